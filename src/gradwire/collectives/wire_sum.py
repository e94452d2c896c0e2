"""Sums of uncompressed elements on a wire: a reduce-scatter and an all-gather, by recursive halving or around a ring.

Both send 2(n-1)/n of the elements, and add elements where they lie, as they arrive.

Halving (Thakur, Rabenseifner and Gropp 2005, section 4.4) has few messages: 2 log2(n). In a stage each rank sends one half of its
range of elements to its partner, and adds the other half. After the last stage each rank has the whole sum of its own shard. The
gather goes through the stages backwards. Where the number of ranks is no power of two, some stages have groups of 3, 5, ...
ranks, which exchange directly.

In the ring a rank sends to its neighbour alone, in small pieces, so that a slow link is always busy. That is faster for large
shards between nodes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch

from gradwire.core import goes_around, primes_of
from gradwire.kernels import cpu
from gradwire.transport import Grid, Operations

_TOGETHER = 16
"""Shards begin at multiples of so many elements."""
_PIECE_BYTES = 2**21
"""Longer messages of halving are cut into pieces of so many bytes: while one is added, the next one is under way."""
_PACKET = 59 * 2**10
"""The bytes of a piece that is one packet of the kernel with its header: a packet has at most 64 KiB with all headers, in whole
segments."""
_RING_PIECES, _SMALLEST_RING_PIECE, _LARGEST_RING_PIECE = 4, 2 * _PACKET, 17 * _PACKET
"""Pieces of a shard in a ring, and the limits of their bytes. A rank sends a piece on while the next one arrives."""


def can_sum(flat: torch.Tensor) -> bool:
    """Whether C++ can sum tensors of this dtype and device. The same on all ranks with the same version."""
    return flat.is_cpu and sums_in_c(flat.dtype)


def sums_in_c(dtype: torch.dtype) -> bool:
    """Whether C++ can sum tensors of this dtype in the host's memory."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and cpu.available() is None


def even_bounds(numel: int, parts: int) -> list[int]:
    """parts + 1 edges of shards of nearly the same length.

    >>> even_bounds(100, 4)
    [0, 16, 48, 64, 100]
    """
    return [numel * at // parts // _TOGETHER * _TOGETHER for at in range(parts)] + [numel]


class Stage(NamedTuple):
    """A stage of halving, seen from one rank."""

    group: tuple[int, ...]
    """The ranks that exchange, in the order of their terms."""
    place: int
    """The place of this rank in the group."""
    edges: tuple[int, ...]
    """The range that each rank of the group has before the stage, cut into a part for each of them."""


def stages_of(grid: Grid, bounds: Sequence[int], nearest_first: bool) -> list[Stage]:
    """The stages of the grid's own rank. `bounds`: world_size + 1 edges of the shards.

    nearest_first: whether ranks of one node exchange first, while ranges are long. Then shards belong to ranks in another order.
    Otherwise the ranks farthest apart exchange first, and rank j has shard j in the end.

    >>> stages_of(Grid.even(1, 4, 1), [0, 10, 20, 30, 40], nearest_first=True)
    [Stage(group=(0, 1), place=1, edges=(0, 20, 40)), Stage(group=(1, 3), place=0, edges=(20, 30, 40))]
    """
    order, size = _order(grid, nearest_first), grid.world_size
    inside = grid.ranks_per_node_if_even or 1
    product, steps = 1, []
    for factor in (*primes_of(inside), *primes_of(size // inside)):
        steps.append((factor, product))
        product *= factor
    at, low, high = order.index(grid.rank), 0, size
    stages = []
    for factor, stride in steps if nearest_first else reversed(steps):
        place = at // stride % factor
        group = tuple(order[at + (other - place) * stride] for other in range(factor))
        shards = (high - low) // factor
        stages.append(Stage(group, place, tuple(bounds[low + part * shards] for part in range(factor + 1))))
        low += place * shards
        high = low + shards
    return stages


def _order(grid: Grid, by_node: bool) -> list[int]:
    """All ranks, those of a node one after another."""
    return [rank for members in grid.members for rank in members] if by_node else list(range(grid.world_size))


class Halving:
    """Recursive halving and doubling. In a group terms are added in the order of its ranks, so a sum does not depend on the place
    of the element in the buffer."""

    def __init__(self, flat: torch.Tensor, grid: Grid, bounds: Sequence[int], by_node: bool) -> None:
        self._flat, self.stages = flat, stages_of(grid, bounds, by_node)
        self.bytes_to = [0] * grid.world_size
        """Bytes that this rank sends to each rank in both phases."""
        for group, place, edges in self.stages:
            parts = [end - start for start, end in pairwise(edges)]
            for other, part in zip(group, parts, strict=True):
                self.bytes_to[other] += (part + parts[place]) * flat.element_size() if other != grid.rank else 0

    def reduce(self, made: Operations, tag: int, shared_with: Sequence[int]) -> None:
        """List the reduce-scatter: this rank's shard becomes the sum."""
        for group, place, edges in self.stages:
            mine = _pieces(self._flat[edges[place] : edges[place + 1]], _PIECE_BYTES)
            if len(group) == 2:
                partner, theirs = group[1 - place], self._flat[edges[1 - place] : edges[2 - place]]
                # the next piece is under way while one is added
                for sent, own in zip_longest(_pieces(theirs, _PIECE_BYTES), [None, *mine]):
                    if sent is not None:
                        made.send(partner, sent, tag)
                    if own is not None:
                        made.receive_elements(partner, own, tag, add=True)
                continue
            for to in _others(group, place):
                for sent in _pieces(self._flat[edges[to] : edges[to + 1]], _PIECE_BYTES):
                    made.send(group[to], sent, tag)
            for own in mine:
                _add_terms(own, group, place, made, tag, shared_with)

    def gather(self, made: Operations, tag: int) -> None:
        """List the all-gather of all shards."""
        for group, place, edges in reversed(self.stages):
            for own in _pieces(self._flat[edges[place] : edges[place + 1]], _PIECE_BYTES):
                for to in _others(group, place):
                    made.send(group[to], own, tag)
            for source in _others(group, place):
                for arriving in _pieces(self._flat[edges[source] : edges[source + 1]], _PIECE_BYTES):
                    made.receive(group[source], arriving, tag)


class RingSum:
    """Shard j starts at the rank after rank j and goes around, one term is added at each hop, and ends at rank j. The sums go
    around once more. Same interface as `Halving`."""

    def __init__(self, flat: torch.Tensor, grid: Grid, bounds: Sequence[int], by_node: bool) -> None:
        order = _order(grid, by_node)
        size, self._at = len(order), order.index(grid.rank)
        self._next, self._before = order[(self._at + 1) % size], order[self._at - 1]
        largest = max(end - start for start, end in pairwise(bounds)) * flat.element_size()
        piece = min(_LARGEST_RING_PIECE, max(_SMALLEST_RING_PIECE, largest // _RING_PIECES // _PACKET * _PACKET))
        self._shards = [_pieces(flat[start:end], piece) for start, end in pairwise(bounds)]
        nbytes = [(end - start) * flat.element_size() for start, end in pairwise(bounds)]
        self.bytes_to = [0] * size
        self.bytes_to[self._next] = 2 * sum(nbytes) - nbytes[self._at] - nbytes[(self._at + 1) % size]

    def _shard(self, at: int) -> list[torch.Tensor]:
        return self._shards[at % len(self._shards)]

    def reduce(self, made: Operations, tag: int, shared_with: Sequence[int]) -> None:
        last = len(self._shards) - 2
        for piece in self._shard(self._at - 1):
            made.send(self._next, piece, tag)
        for hop in range(last + 1):
            for piece in self._shard(self._at - 2 - hop):
                made.receive_elements(self._before, piece, tag, add=True)
                if hop < last:
                    made.send(self._next, piece, tag)

    def gather(self, made: Operations, tag: int) -> None:
        last = len(self._shards) - 2
        for piece in self._shard(self._at):
            made.send(self._next, piece, tag)
        for hop in range(last + 1):
            for piece in self._shard(self._at - 1 - hop):
                made.receive(self._before, piece, tag)
                if hop < last:
                    made.send(self._next, piece, tag)


def _add_terms(
    mine: torch.Tensor, group: Sequence[int], place: int, made: Operations, tag: int, shared_with: Sequence[int]
) -> None:
    """Add the terms of the other ranks of a group to the own one, in the order of the group."""
    # a sum of two terms has one order: with at most one rank before, all others are added to the own term
    before = mine if place < 2 else torch.empty_like(mine)
    for other, source in enumerate(group):
        if other == place:
            made.call([cpu.call("add_into", mine, before)] if place >= 2 else [])
            continue
        into, add = (before, other > 0 or place < 2) if other < place else (mine, True)
        if source in shared_with:
            made.receive_elements(source, into, tag, add)
            continue
        # it may come before its turn: if terms waited for their turns, all ranks would wait for the group's first one
        arrived = torch.empty_like(into) if add else into
        made.receive(source, arrived, tag)
        made.call([cpu.call("add_into", into, arrived)] if add else [])


def _others(group: Sequence[int], place: int) -> list[int]:
    """The places of the others, beginning with the next one, so that not all send to the first rank first."""
    return [(place + step) % len(group) for step in range(1, len(group))]


def _pieces(run: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    return list(run.split(nbytes // run.element_size())) if run.numel() else []


class WireSum:
    """The lists of operations that sum a flat buffer in place, in its own dtype. All ranks get the same bits; of two ranks those
    of any all-reduce."""

    exchanges = 2
    """The number of tags: one for each phase."""

    def __init__(self, flat: torch.Tensor, grid: Grid, bounds: Sequence[int], by_node: bool = True) -> None:
        """`bounds`: world_size + 1 edges of shards. by_node: whether ranks of a node are neighbours. Otherwise rank j has the sum
        of shard j after the reduce-scatter."""
        way: type[RingSum | Halving] = RingSum if goes_around(flat.nbytes, grid.nodes, grid.world_size) else Halving
        self._flat, self._way = flat, partial(way, flat, grid, bounds, by_node)
        self.bytes_to = self._way().bytes_to
        """Bytes that this rank sends to each rank in both phases."""
        self._made: dict[tuple[int, ...], Operations] = {}
        self._made_at = 0, 0

    def operations(self, phases: tuple[int, ...], tag: int, shared_with: Sequence[int]) -> Operations:
        """The list of these phases: 0 is the reduce-scatter, 1 the all-gather. `tag`: of phase 0. Made anew when the buffer's
        memory has moved."""
        if self._made_at != (self._flat.data_ptr(), tag):
            self._made, self._made_at = {}, (self._flat.data_ptr(), tag)
        if phases not in self._made:
            way = self._way()
            self._made[phases] = made = Operations()
            if 0 in phases:
                way.reduce(made, tag, shared_with)
            if 1 in phases:
                way.gather(made, tag + 1)
            made.flush()
            made.release(self._flat)
        return self._made[phases]
