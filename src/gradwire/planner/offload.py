"""ByteComp's Algorithm 2 (section 4.4.3): which compressed tensors encode and decode on CPUs instead.

Tensors of equal size and option form a group. To offload q tensors of a group, the first q in gradient-ready order are the best
choice (Lemma 1), so a strategy is one count for each group. Offloading moves every Comp and Decomp of an option. The search
tries all products of counts, up to `most` of them. Beyond that it uses coordinate descent: it improves one group after the
other, over all its counts, until none changes. Coordinate descent may miss the best strategy.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from gradwire.errors import PlanError
from gradwire.sim.native import TooLongError
from gradwire.sim.replay import Replayed, Replayer, ReplayProgram


class Offload(NamedTuple):
    """What was moved."""

    tensors: tuple[int, ...]
    """Tensors that encode and decode on CPUs, ascending."""
    replayed: Replayed
    """The step."""
    exhaustive: bool
    """Whether all products of counts were tried; else coordinate descent."""
    simulated: int
    """Steps simulated."""


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
    """Algorithm 2 over tensors in gradient-ready order.

    programs: with codecs on GPUs. moved: with them on CPUs, of those tensors that may be offloaded. groups: by tensor, equal
    where size and option are. most: products of counts that are tried. Raises PlanError if `most` is below 1.
    """
    if most < 1:
        raise PlanError(
            f"most is {most}: the search must try at least one strategy, the plan without offloading. Give 1 or more."
        )
    by_group: dict[Hashable, list[int]] = {}
    for tensor in sorted(moved):
        by_group.setdefault(groups[tensor], []).append(tensor)
    members = list(by_group.values())
    exhaustive = math.prod(len(tensors) + 1 for tensors in members) <= most
    if line.native is not None:
        elsewhere = [moved.get(tensor) for tensor in range(len(programs))]
        try:
            counts, step, begins, ends, simulated = line.native.offload(programs, elsewhere, members, skew, exhaustive)
        except TooLongError:
            pass  # Python's whole numbers have no end
        else:
            return Offload(_first(members, counts), Replayed(step, begins, ends), exhaustive, simulated)
    return _OffloadSearch(line, programs, moved, members, skew).run(exhaustive)


def _first(members: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[int, ...]:
    """The first tensors of each group, so many as `counts` says, ascending."""
    return tuple(sorted(t for tensors, count in zip(members, counts, strict=True) for t in tensors[:count]))


class _OffloadSearch:
    def __init__(
        self,
        line: Replayer,
        programs: Sequence[ReplayProgram],
        moved: Mapping[int, ReplayProgram],
        members: Sequence[Sequence[int]],
        skew: int,
    ) -> None:
        self.line, self.programs, self.moved, self.members, self.skew = line, programs, moved, members, skew
        self.releases = range(1, len(programs) + 1)
        self.simulated = 1
        start = line.run(programs, self.releases, skew)
        assert start is not None
        self.best, self.counts = start, [0] * len(self.members)

    def run(self, exhaustive: bool) -> Offload:
        improved = True
        if exhaustive:
            improved = False
            for counts in product(*(range(len(tensors) + 1) for tensors in self.members)):
                self._try(list(counts))
        while improved:
            improved = False
            for group, tensors in enumerate(self.members):
                for count in range(len(tensors) + 1):
                    improved |= self._try([*self.counts[:group], count, *self.counts[group + 1 :]])
        return Offload(_first(self.members, self.counts), self.best, exhaustive, self.simulated)

    def _try(self, counts: list[int]) -> bool:
        """Take these counts if they make the step shorter."""
        if counts == self.counts:
            return False
        offloaded = {*_first(self.members, counts)}
        programs = [self.moved[t] if t in offloaded else program for t, program in enumerate(self.programs)]
        self.simulated += 1
        replayed = self.line.run(programs, self.releases, self.skew, self.best.step - 1)
        if replayed is None:
            return False
        self.best, self.counts = replayed, counts
        return True
