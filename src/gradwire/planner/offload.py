"""ByteComp's Algorithm 2 (section 4.4.3): the choice of compressed tensors that encode and decode on CPUs.

Tensors of equal size and option form a group. To offload q tensors of a group, the first q in gradient-ready order are the best
choice (Lemma 1), so a strategy is one count for each group. Offloading moves every Comp and Decomp of an option. The search
tries all products of counts, up to `most` of them. Beyond that it uses coordinate descent: it improves one group after the
other, over all its counts, until none changes. Coordinate descent may miss the best strategy.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from gradwire.sim import Replayed, Replayer, ReplayProgram, TooLongError


class Offload(NamedTuple):
    tensors: tuple[int, ...]
    """Tensors that encode and decode on CPUs, ascending."""
    replayed: Replayed
    """The step with these tensors on CPUs."""
    exhaustive: bool
    """Whether all products of counts were tried; else coordinate descent."""
    simulated: int
    """Number of simulated steps."""


def on_cpu(option: Sequence[str]) -> tuple[str, ...]:
    """The option with every Comp and Decomp on CPUs.

    >>> on_cpu(["comp:gpu", "allgather:inter", "decomp:gpu"])
    ('comp:cpu', 'allgather:inter', 'decomp:cpu')
    """
    return tuple(task.replace(":gpu", ":cpu") for task in option)


def offload(
    line: Replayer,
    programs: Sequence[ReplayProgram],
    moved: Mapping[int, ReplayProgram],
    groups: Sequence[Hashable],
    skew: int = 1,
    most: int = 100_000,
) -> Offload:
    """Run Algorithm 2 over tensors in gradient-ready order.

    programs: the tensors' programs with codecs on GPUs. moved: by tensor, the programs with codecs on CPUs, for all tensors that
    may be offloaded. groups: the group of each tensor; tensors of equal size and option have equal ones. most: products to try.
    """
    by_group: dict[Hashable, list[int]] = {}
    for tensor in sorted(moved):
        by_group.setdefault(groups[tensor], []).append(tensor)
    members = list(by_group.values())
    exhaustive = math.prod(len(tensors) + 1 for tensors in members) <= most
    if line.native is not None:
        elsewhere = [moved.get(tensor) for tensor in range(len(programs))]
        with suppress(TooLongError):  # Python's integers are unbounded
            counts, step, begins, ends, simulated = line.native.offload(programs, elsewhere, members, skew, exhaustive)
            return Offload(_first(members, counts), Replayed(step, begins, ends), exhaustive, simulated)
    return _search(line, programs, moved, members, skew, exhaustive)


def _first(members: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[int, ...]:
    """The first `counts[g]` tensors of each group g, ascending."""
    return tuple(sorted(t for tensors, count in zip(members, counts, strict=True) for t in tensors[:count]))


def _search(
    line: Replayer,
    programs: Sequence[ReplayProgram],
    moved: Mapping[int, ReplayProgram],
    members: Sequence[Sequence[int]],
    skew: int,
    exhaustive: bool,
) -> Offload:
    releases, simulated = range(1, len(programs) + 1), 1
    start = line.run(programs, releases, skew)
    assert start is not None
    best, counts = start, [0] * len(members)

    def helps(tried: list[int]) -> bool:
        """Take these counts if they make the step shorter."""
        nonlocal best, counts, simulated
        if tried == counts:
            return False
        offloaded = {*_first(members, tried)}
        changed = [moved[t] if t in offloaded else program for t, program in enumerate(programs)]
        simulated += 1
        replayed = line.run(changed, releases, skew, best.step - 1)
        if replayed is None:
            return False
        best, counts = replayed, tried
        return True

    for products in product(*(range(len(tensors) + 1) for tensors in members)) if exhaustive else ():
        helps(list(products))
    improved = not exhaustive
    while improved:
        improved = False
        for group, tensors in enumerate(members):
            for count in range(len(tensors) + 1):
                improved |= helps([*counts[:group], count, *counts[group + 1 :]])
    return Offload(_first(members, counts), best, exhaustive, simulated)
