"""Page-locked memory of the host, through which messages of a device's tensors travel."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradwire.transport.streams import Mark, Streams

_SLOTS = 4
"""Slots of a lane: an exchange takes two, and the copies to the device of the exchange before may still run."""
_ALIGNMENT = 64
"""Regions in a slot begin at multiples of so many bytes."""


class _CopiedRun(NamedTuple):
    """Bytes of the device that are copied together, and their place on the host."""

    on_device: torch.Tensor
    on_host: torch.Tensor


class _PinnedSlot:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.free: Mark = None
        """The end of the last copy from the slot to the device."""


class StagedMessage(NamedTuple):
    """Parts of device tensors, and their places in one slot of page-locked memory."""

    slot: _PinnedSlot
    regions: list[_CopiedRun]
    parts: list[torch.Tensor]
    """The places on the host, of the parts' dtypes."""


class PinnedRing:
    """The page-locked memory of one lane: a ring of slots, each as large as the largest message. It is allocated when the first
    message comes, and again only if a larger one is announced."""

    def __init__(self, streams: Streams, pinned: bool) -> None:
        self._streams, self._pinned = streams, pinned
        self._ring, self._next, self._largest = [_PinnedSlot() for _ in range(_SLOTS)], 0, 0
        self.generation = object()
        """Another object from the moment that a slot has other memory: what is kept by address is of no use then."""

    def reserve(self, parts: Sequence[torch.Tensor]) -> None:
        """Announce a message."""
        self._largest = max(self._largest, sum(part.nbytes + _ALIGNMENT for part in parts))

    def place(self, parts: Sequence[torch.Tensor]) -> StagedMessage:
        """Take a slot for these parts. What it holds is from an earlier message."""
        runs = _runs(parts)
        starts, nbytes = [], 0
        for begin, end, _ in runs:
            starts.append(nbytes)
            nbytes += -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
        slot, regions, placed = self._take(nbytes), [], list(parts)
        for at, (begin, end, members) in zip(starts, runs, strict=True):
            first = parts[members[0]].view(torch.uint8)
            here = first.as_strided((end - begin,), (1,), first.storage_offset())
            regions.append(_CopiedRun(here, slot.memory[at : at + end - begin]))
            for index in members:
                part = parts[index]
                offset = at + part.data_ptr() - begin
                placed[index] = slot.memory[offset : offset + part.nbytes].view(part.dtype)
        return StagedMessage(slot, regions, placed)

    def fetch(self, parts: Sequence[torch.Tensor]) -> StagedMessage:
        """Copy contiguous parts to the host, after what the current stream has queued. Returns when they are there."""
        staged = self.place(parts)
        for on_device, on_host in staged.regions:
            on_host.copy_(on_device, non_blocking=True)
        self._streams.synchronize(self._streams.mark())
        return staged

    def put(self, staged: StagedMessage) -> None:
        """Queue copies of the parts to the device, on the current stream."""
        for on_device, on_host in staged.regions:
            on_device.copy_(on_host, non_blocking=True)
        staged.slot.free = self._streams.mark()

    def _take(self, nbytes: int) -> _PinnedSlot:
        slot, self._next = self._ring[self._next], (self._next + 1) % _SLOTS
        self._streams.synchronize(slot.free)
        self._largest = max(self._largest, nbytes)
        if slot.memory.numel() < self._largest:
            slot.memory = torch.empty(self._largest, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
            self.generation = object()
        return slot


def _runs(parts: Sequence[torch.Tensor]) -> list[tuple[int, int, list[int]]]:
    """Parts that follow each other in memory: first byte, end, and indices of the parts. Empty parts are in none."""
    runs: list[tuple[int, int, list[int]]] = []
    memory = None
    for index in sorted((i for i, part in enumerate(parts) if part.numel()), key=lambda i: parts[i].data_ptr()):
        begin, own = parts[index].data_ptr(), parts[index].untyped_storage().data_ptr()
        end = begin + parts[index].nbytes
        if own == memory and begin <= runs[-1][1]:
            first, before, members = runs[-1]
            runs[-1] = first, max(before, end), [*members, index]
        else:
            runs.append((begin, end, [index]))
        memory = own
    return runs
