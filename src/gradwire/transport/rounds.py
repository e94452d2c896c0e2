"""The other ranks with which a rank exchanges what concerns all ranks: few of many, so that messages and connections stay few.

Merging and gathering go through a tree of groups: all ranks, their parts, the parts of these, and so on, down to single ranks.
Level by level, from the bottom, each rank sends what it has to one rank or two of every other part of its group.

| ranks | messages of a rank | hops | neighbours |
|---|---|---|---|
| 16 | 15 | 1 | 7 |
| 64 | 14 | 2 | 11 |
| 256 | 30 | 2 | 15 |
| 1024 | 33 | 3 | 19 |
"""

from functools import cache
from itertools import count, pairwise
from typing import NamedTuple

from gradwire.core import merge_levels


class MergeRound(NamedTuple):
    """The messages of one rank on one level."""

    sources: tuple[int, ...]
    """For each part of the group the rank that brings it; the own rank for the own part."""
    targets: tuple[int, ...]
    """The ranks that get what this rank has merged."""
    edges: tuple[int, ...]
    """The first rank of each part, and the end of the last one."""


@cache
def merge_rounds(rank: int, world_size: int) -> tuple[MergeRound, ...]:
    """The rounds of a rank.

    >>> merge_rounds(1, 3)
    (MergeRound(sources=(0, 1, 2), targets=(2, 0), edges=(0, 1, 2, 3)),)
    >>> [len(each.targets) for each in merge_rounds(5, 64)]
    [7, 7]
    """
    levels = merge_levels(world_size)
    most = next(each for each in count(1) if each**levels >= world_size)
    rounds, start, end = [], 0, world_size
    for _ in range(levels):
        parts = min(most, end - start)
        edges = [start + (end - start) * part // parts for part in range(parts + 1)]
        own = next(part for part, edge in enumerate(edges[1:]) if rank < edge)
        place, size = rank - edges[own], edges[own + 1] - edges[own]
        sources, targets = [], list[int]()
        for first, last in pairwise(edges):
            sources.append(first + place % (last - first))
            targets += [other for other in range(first, last) if (other - first) % size == place]
        sources[own] = rank
        after = [other for other in targets if other > rank]  # not all send to the lowest rank first
        rounds.append(MergeRound(tuple(sources), (*after, *(other for other in targets if other < rank)), tuple(edges)))
        start, end = edges[own], edges[own + 1]
    return tuple(reversed(rounds))


def merge_peers(rank: int, world_size: int) -> set[int]:
    """The ranks that a rank sends to, or receives from, in its rounds.

    >>> sorted(merge_peers(1, 3)), len(merge_peers(5, 64))
    ([0, 2], 14)
    """
    rounds = merge_rounds(rank, world_size)
    return {other for each in rounds for other in (*each.sources, *each.targets)} - {rank}


def neighbours(rank: int, world_size: int) -> set[int]:
    """The ranks at distances of 1, 2, 4, 8 and so on, in both directions around the ring of all ranks.

    Whoever falls silent, news of it passes from neighbour to neighbour in about log2 hops, also where several ranks next to each
    other are gone.

    >>> sorted(neighbours(0, 4)), sorted(neighbours(0, 16))
    ([1, 2, 3], [1, 2, 4, 8, 12, 14, 15])
    """
    steps = [2**power for power in range(world_size.bit_length()) if 2 ** (power + 1) <= world_size]
    return {(rank + sign * step) % world_size for step in steps for sign in (1, -1)} - {rank}
