"""A plan in memory, ready to run: buckets, the executor that works on them, what compressors remember, and random streams."""

from typing import NamedTuple

import torch

from gradwire.collectives import Group, Lane
from gradwire.core.plan import Plan
from gradwire.core.specs import innermost
from gradwire.engine.executor import Executor
from gradwire.engine.layout import build_buckets
from gradwire.engine.memory import Remembered

__all__ = ["Assembly", "assemble"]


class Assembly(NamedTuple):
    """All that a plan needs for its steps."""

    executor: Executor
    memory: Remembered
    random: torch.Tensor
    """Keys of the random streams, int64 of shape (buckets, encodes, 4): seed, step, encode, rank."""


def assemble(plan: Plan, parameters: dict[str, torch.nn.Parameter], group: Group, lanes: list[Lane]) -> Assembly:
    """Raises PlanError for what this version cannot run, naming it."""
    device = next(iter(parameters.values())).device
    random = torch.zeros(len(plan.buckets), 2, 4, dtype=torch.int64, device=device)
    for index, bucket in enumerate(plan.buckets):
        random[index, :, 0] = getattr(innermost(bucket.spec_of(bucket.tensors[0])), "seed", 0)
    random[:, 1, 2] = 1
    random[:, :, 3] = group.rank
    buckets = build_buckets(plan, parameters, group, random)
    return Assembly(Executor(plan, buckets, lanes), Remembered(buckets, group.rank), random)
