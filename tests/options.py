"""Options run by all ranks of a grid, in one process or many: what tests and the benchmark of all options share."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from fake_links import FakeLink, drive

from gradwire.collectives import Grid, Group
from gradwire.core import Plan, Spec, TensorInfo, fingerprint
from gradwire.core.plan import Bucket
from gradwire.engine.assembly import Assembly, assemble
from gradwire.engine.layout import BucketBuffers

__all__ = ["SIZES", "Ranks", "gradients", "plan_for"]

SIZES = (703, 1, 299)
"""Elements of three tensors, 1003 in all: no multiple of a block, of ranks, of anything."""


def plan_for(
    tasks: Sequence[str], spec: Spec, sizes: Iterable[int] = SIZES, dtype: str = "float32", chunk_bytes: int = 0
) -> Plan:
    """One bucket of tensors t0, t1, .. that travels like this."""
    tensors = [TensorInfo(f"t{index}", (size,), dtype) for index, size in enumerate(sizes)]
    names = tuple(tensor.name for tensor in tensors)
    bucket = Bucket(tensors=names, spec=spec, option=tuple(tasks), chunk_bytes=chunk_bytes)
    launch = tuple((0, word) for word in bucket.link_tasks)
    return Plan(fingerprint=fingerprint(tensors), buckets=(bucket,), launch=launch)


def gradients(rank: int, step: int, sizes: Iterable[int] = SIZES) -> list[torch.Tensor]:
    """Normal numbers, others for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator) for size in sizes]


class Ranks:
    """All ranks of a grid in one process, with one plan."""

    def __init__(
        self, plan: Plan, grid: Sequence[Grid], sizes: Iterable[int] = SIZES, dtype: torch.dtype = torch.float32
    ):
        self.plan, self.sizes, self.world_size = plan, tuple(sizes), len(grid)
        everybody, minute = tuple(range(len(grid))), timedelta(seconds=60)
        nobody: Any = None
        self.ranks: list[Assembly] = []
        for rank in everybody:
            group = Group(nobody, rank, everybody, minute, grid[rank])
            parameters = {
                f"t{index}": torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for index, size in enumerate(self.sizes)
            }
            lanes: list[Any] = []
            self.ranks.append(assemble(plan, parameters, group, [*lanes, nobody], 0))

    @property
    def buckets(self) -> list[BucketBuffers]:
        """Of each rank."""
        return [rank.executor.buckets[0] for rank in self.ranks]

    def step(self, step: int, given: Sequence[Sequence[torch.Tensor]]) -> list[FakeLink]:
        """Exchange what each rank gives; the means are in `results()` then."""
        for rank, own in zip(self.ranks, given, strict=True):
            rank.random[:, :, 1] = step
            for slot, gradient in zip(rank.executor.buckets[0].slots, own, strict=True):
                torch.mul(gradient, 1.0 / self.world_size, out=slot.view)
        sent = []
        for chunk in range(len(self.buckets[0].chunks)):
            sent += drive([bucket.chunks[chunk] for bucket in self.buckets], len(self.plan.buckets[0].link_tasks))
        return sent

    def results(self) -> list[torch.Tensor]:
        """What each rank's bucket holds."""
        return [bucket.flat for bucket in self.buckets]
