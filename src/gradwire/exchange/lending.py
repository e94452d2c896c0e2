"""Tensors that an exchange works on where they lie, from the moment they are ready until the step ends.

A tensor that kernels cannot read as it is, or that shares memory with another one of the same step, is copied first: what the
mean is written to must be nobody else's.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from gradwire.exchange.layout import Slot
from gradwire.kernels import Addresses, tensor_key


class Lent:
    """The tensors of one step."""

    def __init__(self, names: Iterable[str]) -> None:
        """names: of all tensors, those of a bucket next to each other; none where all are copied into flat buffers."""
        self._at = {name: number for number, name in enumerate(names)}
        self.addresses = Addresses(map(tensor_key, self._at)) if self._at else None
        """Where kernels find the tensors."""
        self.begins: set[int] = set()
        """The addresses of those that were lent in this step."""
        self._runs: list[tuple[int, int]] = []
        """Begin and end of the memory of those that `lend` lent, ascending."""
        self._changed: list[torch.Tensor] = []
        """Those of which autograd must know that they change."""

    def number(self, slot: Slot) -> int:
        """Where the tensor is among those of `lend_all`."""
        return self._at[slot.name]

    def of(self, slot: Slot) -> torch.Tensor:
        """What was lent in this step, or the copy that stands for it."""
        tensor = self.now(slot)
        assert tensor is not None, "nothing was lent"
        return tensor

    def now(self, slot: Slot) -> torch.Tensor | None:
        """As `of`; None where nothing is lent yet, or any more."""
        return None if self.addresses is None else self.addresses.tensors[self._at[slot.name]]

    def lend(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        """Work on this tensor, or on a copy. Returns the one of the two that will hold the mean."""
        if not (_is_plain(tensor) and slot.holds(tensor) and self._is_alone(tensor)):
            tensor = slot.empty().copy_(tensor)
        self.lend_all(self._at[slot.name], [tensor], [tensor.data_ptr()])
        return tensor

    def lend_all(self, first: int, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Work on these tensors, numbered from `first` on, which begin at these addresses. They are as slots, and their memory is
        nobody else's."""
        assert self.addresses is not None
        self.addresses.set(first, tensors, addresses)
        self.begins.update(addresses)
        self._changed += tensors if len(tensors) > 1 else [each for each in tensors if not each.is_inference()]

    def put_back(self, slot: Slot, tensor: torch.Tensor) -> None:
        """The tensor that was to be lent holds the mean, also where a copy was lent."""
        if (lent := self.of(slot)).data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(lent)

    def tell_autograd(self) -> None:
        """Scripts may use the tensors from now on, and find the means in them."""
        torch.autograd.graph.increment_version(self._changed)
        self._changed = []

    def give_back(self) -> None:
        """The step is over."""
        if self.addresses is not None and self.begins:
            self.tell_autograd()
            self.begins, self._runs = set(), []
            self.addresses.clear()

    def _is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether no other tensor of the step has a part of its memory. Takes note of it if so."""
        begin, nbytes = tensor.data_ptr(), tensor.nbytes
        if begin in self.begins or not nbytes:
            return not nbytes
        at = bisect_right(self._runs, (begin,))
        before = self._runs[at - 1][1] if at else 0
        if before > begin or (at < len(self._runs) and self._runs[at][0] < begin + nbytes):
            return False
        self._runs.insert(at, (begin, begin + nbytes))
        return True


class BucketLayout(NamedTuple):
    """Where the tensors of one bucket lie."""

    slots: list[Slot]
    flat: torch.Tensor
    aliases: list[torch.Tensor]
    """All tensors of gradwire's own in the memory of the flat buffer, that one first."""
    lent: Lent | None
    """Takes the tensors where the bucket has no memory."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are the numbers in its memory, and no graph may need them."""
    aligned = tensor.data_ptr() % tensor.element_size() == 0
    return type(tensor) is torch.Tensor and aligned and not (tensor.requires_grad or tensor.is_neg())
