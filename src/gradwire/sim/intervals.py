"""Sets of moments, as sorted intervals that do not touch."""

from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of the intervals, which may overlap and have any order.

    >>> union([(5, 6), (0, 2), (2, 3)])
    [(0, 3), (5, 6)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The moments in the first set and not in the second; both as `union` gives them.

    >>> minus([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    result: list[Interval] = []
    cuts = list(others)
    at = 0
    for start, end in intervals:
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        index = at
        while index < len(cuts) and cuts[index][0] < end:
            if start < cuts[index][0]:
                result.append((start, cuts[index][0]))
            start = max(start, cuts[index][1])
            index += 1
        if start < end:
            result.append((start, end))
    return result


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The gaps between the intervals of a set as `union` gives it.

    >>> gaps([(0, 2), (5, 6)])
    [(2, 5)]
    """
    return [(end, start) for (_, end), (start, _) in pairwise(intervals)]


def total(intervals: Iterable[Interval]) -> int:
    """The length of all intervals together."""
    return sum(end - start for start, end in intervals)
