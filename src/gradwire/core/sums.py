"""Shapes of exchanges that follow from the number of ranks: `gradwire.collectives` runs them and `gradwire.costs` prices them."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from math import isqrt

AT_ONCE = 16
"""Ranks that exchange in one hop, and that all connect with each other at the start. More ranks: fewer connections, and more
hops."""
_SHARD_BYTES = 2**16
"""Between nodes, shards of so many bytes or more go around a ring."""
_FEW_RANKS = 16
"""The most ranks for which that is so. More ranks need larger shards, in proportion to their number: each of 2(n - 1) hops takes
the link's latency, and halving has 2 log2 n. So bytes must take long enough that the ring's better use of the link counts."""


def least_ring_bytes(world_size: int) -> int:
    """The least bytes of a sum that go around a ring of so many ranks.

    >>> [least_ring_bytes(ranks) // 2**20 for ranks in (16, 64, 1024)]
    [1, 64, 16384]
    """
    return _SHARD_BYTES * world_size * (1 if world_size <= _FEW_RANKS else world_size // 4)


def goes_around(nbytes: float, nodes: int, world_size: int) -> bool:
    """Whether a sum of so many bytes goes around a ring. Otherwise ranges are halved.

    >>> goes_around(8 * 2**16, nodes=8, world_size=8), goes_around(2**30, nodes=1, world_size=8)
    (True, False)
    >>> goes_around(2**28, nodes=64, world_size=64), goes_around(2**28, nodes=1024, world_size=1024)
    (True, False)
    """
    return nodes > 1 and world_size > 2 and nbytes >= least_ring_bytes(world_size)


def merge_levels(world_size: int) -> int:
    """The hops by which what concerns all ranks, such as their reports, gets from each rank to all.

    >>> [merge_levels(ranks) for ranks in (1, 16, 17, 1024)]
    [1, 1, 2, 3]
    """
    return next(each for each in count(1) if AT_ONCE**each >= world_size)


def primes_of(number: int) -> list[int]:
    """The prime factors in ascending order: the sizes of the groups that exchange in the stages of recursive halving.

    >>> primes_of(12), primes_of(1)
    ([2, 2, 3], [])
    """
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


@lru_cache(maxsize=64)
def rows_of(ranks: int) -> tuple[int, ...]:
    """The lengths of the rows of the grid of so many ranks. All are alike, with as many columns as the least divisor that is not
    below the square root; but where a shorter last row leaves a rank at most half the peers, there is one.

    >>> rows_of(12), rows_of(16), rows_of(17), rows_of(7)
    ((4, 4, 4), (4, 4, 4, 4), (6, 6, 5), (7,))
    """
    even = (columns_of(ranks),) * (ranks // columns_of(ranks))
    shapes = (((columns,) * (ranks // columns), ranks % columns) for columns in range(2, min(2 * isqrt(ranks), ranks // 2) + 1))
    uneven = min(((*whole, last) for whole, last in shapes if last), key=peers_of, default=even)
    return uneven if 2 * peers_of(uneven) <= peers_of(even) else even


def columns_of(ranks: int) -> int:
    """The least divisor that is not below the square root."""
    return ranks // next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)


def peers_of(rows: Sequence[int]) -> int:
    """The most ranks to which a rank of the grid with these rows sends.

    >>> peers_of((4, 4, 4)), peers_of((6, 6, 5))
    (5, 7)
    """
    columns, last, whole = rows[0], rows[-1], rows.count(rows[0])
    return max(columns + len(rows) - 2, last - 1 - -columns * whole // last if last < columns else 0)
