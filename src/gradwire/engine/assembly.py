"""A plan in memory, ready to run: buckets, the executor that works on them, what compressors remember, and random streams."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradwire.collectives import Group, Lane, share_scratch
from gradwire.core.plan import Plan
from gradwire.core.specs import Spec, innermost
from gradwire.engine.executor import Executor
from gradwire.engine.layout import build_buckets
from gradwire.engine.memory import Remembered

__all__ = ["Assembly", "assemble"]

_LAST_STEP = 2**62
_MOST_ENCODES = 4
"""Of any option: before both first steps and before both second ones."""


class Assembly(NamedTuple):
    """All that a plan needs for its steps."""

    executor: Executor
    memory: Remembered
    random: torch.Tensor
    """Keys of the random streams, int64 of shape (buckets, 8, 4): seed, step, encode, rank. Encodes 0 to 3 are those of a
    scheme, 4 to 7 are the roundings of residuals that these store narrow."""
    step: int
    """The step whose specs it runs."""
    changing: tuple[Spec, ...]
    """Those of its specs that are others in other steps."""

    def outdated(self, step: int) -> bool:
        """Whether in this step a spec is another one than in the step it was made for."""
        return any(spec.at_step(step) != spec.at_step(self.step) for spec in self.changing)


def assemble(
    plan: Plan,
    parameters: dict[str, torch.nn.Parameter],
    group: Group,
    lanes: list[Lane],
    step: int,
    flats: Sequence[torch.Tensor] | None = None,
) -> Assembly:
    """Buckets that run a plan from this step on, in these flat buffers if given. Raises PlanError for what this version
    cannot run, naming it."""
    device = next(iter(parameters.values())).device
    random = torch.zeros(len(plan.buckets), 2 * _MOST_ENCODES, 4, dtype=torch.int64, device=device)
    for index, bucket in enumerate(plan.buckets):
        random[index, :, 0] = getattr(innermost(bucket.spec_of(bucket.tensors[0])), "seed", 0)
    random[:, :, 2] = torch.arange(2 * _MOST_ENCODES)
    random[:, :, 3] = group.rank
    specs = {spec for bucket in plan.buckets for spec in bucket.specs}
    changing = tuple(spec for spec in specs if spec.at_step(0) != spec.at_step(_LAST_STEP))
    buckets = build_buckets(plan, parameters, group, random, step, flats)
    executor = Executor(plan, buckets, lanes)
    for tasks in executor.tasks:
        pieces = [buckets[task.bucket].chunks[task.chunk] for task in tasks if task.phase == 0]
        share_scratch(memory for piece in pieces for memory in piece.memory)
    return Assembly(executor, Remembered(buckets), random, step, changing)
