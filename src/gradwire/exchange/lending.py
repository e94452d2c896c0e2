"""Tensors that an exchange works on where they lie, from the moment they are ready until the step ends.

A tensor that kernels cannot read as it is, or that shares memory with another one of the same step, is copied first: what the
mean is written to must be nobody else's.
"""

from bisect import bisect_right
from collections.abc import Collection

import torch

from gradwire.exchange.layout import Slot
from gradwire.kernels import tensor_key
from gradwire.kernels.scattered import Addresses


class Lent:
    """The tensors of one step, by name."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of all tensors; none where all are copied into flat buffers."""
        self.addresses = Addresses(map(tensor_key, names)) if names else None
        """Where kernels find the tensors."""
        self.tensors: dict[str, torch.Tensor] = {}
        """What was lent in this step, or the copy that stands for it."""
        self._runs: list[tuple[int, int]] = []
        """Begin and end of their memory, ascending."""

    def lend(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        """Work on this tensor, or on a copy. Returns the one of the two that will hold the mean."""
        if not (_is_plain(tensor) and slot.holds(tensor) and self._is_alone(tensor)):
            tensor = slot.empty().copy_(tensor)
            self._is_alone(tensor)
        assert self.addresses is not None
        self.tensors[slot.name] = tensor
        self.addresses.set(slot.key, tensor)
        return tensor

    def put_back(self, slot: Slot, tensor: torch.Tensor) -> None:
        """The tensor that was to be lent holds the mean, also where a copy was lent."""
        if (lent := self.tensors[slot.name]).data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(lent)

    def give_back(self) -> None:
        """The step is over. Autograd is told that the tensors have changed."""
        if self.addresses is not None and self.tensors:
            torch.autograd.graph.increment_version([t for t in self.tensors.values() if not t.is_inference()])
            self.tensors, self._runs = {}, []
            self.addresses.clear()

    def _is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether no other tensor of the step has a part of its memory. Takes note of it if so."""
        begin, nbytes = tensor.data_ptr(), tensor.nbytes
        if not nbytes:
            return True
        at = bisect_right(self._runs, (begin,))
        before = self._runs[at - 1][1] if at else 0
        if before > begin or (at < len(self._runs) and self._runs[at][0] < begin + nbytes):
            return False
        self._runs.insert(at, (begin, begin + nbytes))
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are the numbers in its memory, and no graph may need them."""
    aligned = tensor.data_ptr() % tensor.element_size() == 0
    return type(tensor) is torch.Tensor and aligned and not (tensor.requires_grad or tensor.is_neg())
