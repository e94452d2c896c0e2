"""The gradients that scripts get: where a bucket has no memory those that autograd made, elsewhere tensors over its memory.

A script that keeps a view of a gradient (`p.grad.view(-1)`), sets `p.grad` to None and goes on expects the view to stay as it is,
as under DDP, where new gradients are in new memory. So before anything is written the uses of the memory are counted, and where
the script has one left the bucket moves elsewhere.
"""

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from gradwire.exchange import Exchange, Lent, Slot


class BucketMemory:
    """The flat buffer of a bucket and all tensors of gradwire's own that lie in its memory."""

    def __init__(self, ours: Sequence[torch.Tensor]) -> None:
        """The flat buffer first. No more of them may be made."""
        self._ours = list({id(tensor): tensor for tensor in ours}.values())
        self.flat = self._ours[0]
        self._handed: dict[int, torch.Tensor] = {}
        """Tensors that the script got and still holds, by id."""
        self._storage = self.flat.untyped_storage()
        self._uses = self._count()

    def hand_out(self, view: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, and no view, over a part of the memory."""
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        self._handed[id(alias)] = alias
        return alias

    def take_back(self, alias: torch.Tensor) -> None:
        """The script has another gradient now, and this part is about to be written."""
        self._handed.pop(id(alias), None)

    def leave_to_script(self) -> None:
        """Move, if the script has a use of the memory that is none of the tensors handed out."""
        if self._count() > self._uses + len(self._handed):
            self._move()

    def _count(self) -> int:
        return _storage_uses(self._storage._cdata)

    def _move(self) -> None:
        elsewhere = self.flat.clone()
        for tensor in [*self._ours, *self._handed.values()]:
            if tensor.untyped_storage().data_ptr() == self._storage.data_ptr():
                tensor.data = elsewhere.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self._storage = self.flat.untyped_storage()


class Gradient:
    """The gradient of one parameter, where it lies."""

    def __init__(self, slot: Slot, memory: BucketMemory) -> None:
        self.slot, self.memory = slot, memory
        self._shape, self._strides = slot.view.shape, slot.view.stride()
        self.handed: torch.Tensor | None = None
        """The `grad` of the last step, whose memory is the slot's."""
        self.stand_in: torch.Tensor | None = None
        """The tensor that scripts get as `grad` where no rank holds the whole sum."""

    def hand_out(self) -> torch.Tensor:
        """Return the parameter's next `grad`: the stand-in, or else a tensor in the slot. That is a tensor of its own and no
        view: scripts may give it other memory, or detach it."""
        if self.stand_in is not None:
            return self.stand_in
        if self.handed is None or self.handed.data_ptr() != self.slot.view.data_ptr():
            if self.handed is not None:
                self.memory.take_back(self.handed)
            self.handed = self.memory.hand_out(self.slot.view)
        return self.handed

    def take_over(self, grad: torch.Tensor | None) -> None:
        """Before the slot is written, with the parameter's present `grad`. A script that kept the last one and began
        another (`grads.append(p.grad); p.grad = None`) keeps its values, in memory of its own."""
        if self.let_go(grad):
            self.memory.leave_to_script()

    def let_go(self, grad: torch.Tensor | None) -> bool:
        """Do what `take_over` does but for `leave_to_script`, which must follow before any write if this returns True."""
        if self.handed is None or self.handed is grad:
            return False
        alone = _references(self) == _ALONE + 1  # the memory refers to it too
        if not (alone and self._is_as_made(self.handed)):
            self.memory.take_back(self.handed)
            if _references(self) > _ALONE:
                self.handed.data = self.handed.clone()
            self.handed = None
        return True

    def _is_as_made(self, handed: torch.Tensor) -> bool:
        """Whether a tensor that nothing in Python refers to can be handed out once more. Asks nothing for which torch would let
        go of Python's lock: a lane would take it."""
        in_a_graph = handed._use_count() > 1 or handed.requires_grad  # type: ignore[attr-defined]
        there = handed.data_ptr() == self.slot.view.data_ptr() and handed.shape == self._shape
        return there and handed.stride() == self._strides and not in_a_graph and not vars(handed)

    def settle(self, parameter: torch.nn.Parameter, own: torch.Tensor | None, used_anywhere: bool) -> None:
        """Set the `grad` of a parameter without a gradient in this backward to the mean. If no rank used the parameter, restore
        `own`."""
        if used_anywhere:
            parameter.grad = self.hand_out()
        elif own is not None and parameter.grad is self.handed:
            self.slot.view.copy_(own)


Calling: TypeAlias = tuple[int, torch.Tensor] | None


class LentGradient:
    """The gradient of one parameter whose bucket has no memory."""

    stand_in = None

    def __init__(self, slot: Slot, lent: Lent) -> None:
        self.slot, self._lent = slot, lent

    @property
    def handed(self) -> torch.Tensor | None:
        """The tensor that is lent at present."""
        return self._lent.now(self.slot)

    def hand_out(self) -> torch.Tensor:
        """Return the parameter's next `grad`: the tensor that was lent."""
        return self._lent.of(self.slot)

    def take_over(self, grad: torch.Tensor | None) -> None:
        """Nothing of the last step is written."""

    def settle(self, parameter: torch.nn.Parameter, own: torch.Tensor | None, used_anywhere: bool) -> None:
        """See `Gradient.settle`. A copy of `own` was lent, so `grad` is what it was."""
        if used_anywhere:
            parameter.grad = self.hand_out()


class LentRun:
    """All gradients of a bucket without memory: they are lent together, when the last one is ready."""

    def __init__(self, indices: list[int], gradients: list[LentGradient], exchange: Exchange, lent: Lent) -> None:
        self.indices, self.gradients, self._exchange, self._lent = indices, gradients, exchange, lent
        self.slots = [gradient.slot for gradient in gradients]
        views = [slot.view for slot in self.slots]
        self.shapes = [view.shape for view in views]
        self._strides, self._dtypes = [view.stride() for view in views], {view.dtype for view in views}
        self._first = lent.number(gradients[0].slot)

    def fill(self, grads: list[torch.Tensor], calling: Calling) -> list[torch.Tensor]:
        """Lend these, which have the run's shapes, or copies of those that it cannot write to: where others use the memory, the
        rest of backward may read it. Returns what was lent. `calling`: the parameter whose node calls its hook, and what the node
        accumulated."""
        uses = [_storage_uses(storage._cdata) for storage in map(_STORAGE, grads)]
        if calling is not None and calling[0] in self.indices:
            at = self.indices.index(calling[0])
            uses[at] -= _held_by_node(calling[1], grads[at])
        addresses = list(map(_ADDRESS, grads))
        are_new = len({*addresses}) == len(addresses) and self._lent.begins.isdisjoint(addresses)  # in this run and in the step
        if are_new and max(uses) <= _USES_ALONE and self._are_usual(grads):
            self._lent.lend_all(self._first, grads, addresses)
            lent = grads
        else:
            lent = [
                self._lent.lend(gradient.slot, grad if used <= _USES_ALONE else gradient.slot.empty().copy_(grad))
                for gradient, grad, used in zip(self.gradients, grads, uses, strict=True)
            ]
        if not (weight := self._exchange.weight):
            torch._foreach_zero_(lent)
        elif weight != 1:
            torch._foreach_mul_(lent, weight)
        return lent

    def _are_usual(self, grads: list[torch.Tensor]) -> bool:
        """Whether all are like their slots, and nothing else. Scalars are not asked whether they are negated views, as others are
        that have these strides; torch would let go of Python's lock, and a lane would take it."""
        plain = {*map(type, grads)} == {torch.Tensor} and {*map(_DTYPE, grads)} == self._dtypes
        return plain and list(map(_STRIDE, grads)) == self._strides and () not in self._strides and not any(map(_TRACKED, grads))

    def alone(self, at: int) -> "LentRun":
        return LentRun([self.indices[at]], [self.gradients[at]], self._exchange, self._lent)


class Run:
    """Gradients that lie next to each other in a bucket. They are copied into their slots together, when the last one is
    ready: two operations for all of them. One operation for each would take a microsecond or two, however small it is."""

    def __init__(self, indices: list[int], gradients: list[Gradient], place: torch.Tensor, exchange: Exchange) -> None:
        """`place`: the part of the bucket's flat buffer that their slots fill."""
        self.indices, self.gradients, self._place, self._exchange = indices, gradients, place, exchange
        self.slots = [gradient.slot for gradient in gradients]
        self._views = [slot.view for slot in self.slots]
        self.shapes = [view.shape for view in self._views]

    def fill(self, grads: list[torch.Tensor], calling: Calling) -> list[torch.Tensor]:
        """The slots take these, which have the run's shapes, times this rank's share of the mean. Returns what becomes the grads.
        See `LentRun`."""
        let_go = [gradient.let_go(grad) for gradient, grad in zip(self.gradients, grads, strict=True)]
        if any(let_go):
            self.gradients[0].memory.leave_to_script()
        if not self._exchange.weight:
            self._place.zero_()
        elif len(grads) == 1:
            torch.mul(grads[0], self._exchange.share, out=self._views[0])
        else:
            torch._foreach_copy_(self._views, grads)
            self._place.mul_(self._exchange.share)
        return [gradient.hand_out() for gradient in self.gradients]

    def alone(self, at: int) -> "Run":
        return Run([self.indices[at]], [self.gradients[at]], self._views[at], self._exchange)


AnyGradient: TypeAlias = Gradient | LentGradient
AnyRun: TypeAlias = Run | LentRun


def gradients_of(exchange: Exchange, names: Sequence[str]) -> tuple[list[AnyGradient], list[AnyRun]]:
    """The gradients of these parameters, in order, and the runs of all buckets."""
    index_of = {name: index for index, name in enumerate(names)}
    by_index: dict[int, AnyGradient] = {}
    runs: list[AnyRun] = []
    for slots, flat, aliases, lent in exchange.layouts():
        if lent is not None:
            indices = [index_of[slot.name] for slot in slots]
            apart = [LentGradient(slot, lent) for slot in slots]
            by_index.update(zip(indices, apart, strict=True))
            runs.append(LentRun(indices, apart, exchange, lent))
            continue
        parts = _cut(slots)
        places = [flat[part[0].offset : part[-1].offset + part[-1].view.numel()] for part in parts]
        memory = BucketMemory([*aliases, *places])
        for part, place in zip(parts, places, strict=True):
            gradients = [Gradient(slot, memory) for slot in part]
            run = Run([index_of[slot.name] for slot in part], gradients, place, exchange)
            by_index.update(zip(run.indices, gradients, strict=True))
            runs.append(run)
    return [by_index[index] for index in range(len(names))], runs


_RUN_BYTES = 2**17
"""The most bytes of a run of several gradients on CPUs: they stay in a core's cache until the last one is ready."""
_DEVICE_RUN_BYTES = 2**26
"""The most bytes of a run on a device, where a run takes two launches."""


def _cut(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots of a bucket, cut into runs."""
    parts: list[list[Slot]] = []
    nbytes, most = 0, _RUN_BYTES if slots[0].device.type == "cpu" else _DEVICE_RUN_BYTES
    for slot in slots:
        nbytes += slot.view.nbytes
        if not parts or nbytes > most:
            parts.append([])
            nbytes = slot.view.nbytes
        parts[-1].append(slot)
    return parts


_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
_STORAGE, _ADDRESS, _STRIDE = torch.Tensor.untyped_storage, torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _TRACKED = attrgetter("dtype"), attrgetter("requires_grad")


def _held_by_node(accumulated: torch.Tensor, grad: torch.Tensor) -> int:
    """How often a node uses the memory of the gradient that it made of what it accumulated. A view counts with what it is a view
    of, unless anything else refers to that: then the rest of backward may."""
    if accumulated.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr():
        return 0  # the values were added to a gradient, or copied
    base = accumulated._base
    return 1 if base is None or base._use_count() > _BASE_USES else 2  # type: ignore[attr-defined]


def _base_uses() -> int:
    with torch.inference_mode(False):  # a script may import this inside
        view = torch.empty(0, device="cpu").view(0)
    assert view._base is not None
    uses: int = view._base._use_count()  # type: ignore[attr-defined]
    return uses


_BASE_USES = _base_uses()
"""The count for a tensor that nothing but a view of it refers to."""
_EMPTY = torch.UntypedStorage(0)
_USES_ALONE = _storage_uses(_EMPTY._cdata) + 1
"""The count for a storage that one tensor uses."""


def _references(holder: Any) -> int:
    return sys.getrefcount(holder.handed)


_ALONE = _references(SimpleNamespace(handed=object()))
"""The count when nobody else refers to it; versions of Python differ."""
