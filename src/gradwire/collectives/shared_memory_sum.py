"""An all-reduce of ranks that all share memory: each adds its shard straight from the other ranks' memory, then sends the sum."""

from itertools import pairwise

import torch

from gradwire.kernels import cpu
from gradwire.transport import Operations

_TOGETHER = 16
"""Shards begin at multiples of so many elements."""


def can_sum(flat: torch.Tensor) -> bool:
    """Whether C++ can sum tensors of this dtype and device. The same on all ranks with the same version."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return flat.is_cpu and flat.dtype in dtypes and cpu.available() is None


class MemorySum:
    """The list of operations that sums a flat buffer in place, in its own dtype.

    Shard j becomes the sum on rank j, where it lies. Terms are added in the order of ranks, so all buffers with the same elements
    have the same sums. Of two ranks the sum is that of any all-reduce, bit for bit.
    """

    exchanges = 2
    """The tags it uses."""

    def __init__(self, flat: torch.Tensor, rank: int, world_size: int) -> None:
        self._flat, self._rank, self._world_size = flat, rank, world_size
        numel = flat.numel()
        bounds = [numel * at // world_size // _TOGETHER * _TOGETHER for at in range(world_size)] + [numel]
        self.parts = [flat[start:end] for start, end in pairwise(bounds)]
        """The shards, which share the buffer's memory and move with it."""
        self._made: Operations | None = None
        self._made_at = 0, 0

    def operations(self, tag: int) -> Operations:
        """Made anew when the buffer's memory has moved."""
        if self._made is None or self._made_at != (self._flat.data_ptr(), tag):
            self._made, self._made_at = self._list(tag), (self._flat.data_ptr(), tag)
        return self._made

    def _list(self, tag: int) -> Operations:
        rank, size, parts = self._rank, self._world_size, self.parts
        mine, others = parts[rank], [(rank + step) % size for step in range(1, size)]
        made = Operations()
        for to in others:
            if parts[to].numel():
                made.send(to, parts[to], tag)
        if mine.numel():
            # a sum of two terms has one order: with at most one rank below, all others are added to the own part
            below = mine if rank < 2 else torch.empty_like(mine)
            for source in range(rank):
                made.receive_elements(source, below, tag, add=source > 0 or rank < 2)
            if rank >= 2:
                made.call([cpu.call("add_into", mine, below)])
            for source in range(rank + 1, size):
                made.receive_elements(source, mine, tag, add=True)
        made.flush()
        if mine.numel():
            for to in others:
                made.send(to, mine, tag + 1)
        for source in others:
            if parts[source].numel():
                made.receive(source, parts[source], tag + 1)
        made.flush()
        return made
