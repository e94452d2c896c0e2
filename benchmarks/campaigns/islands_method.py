"""`gw.islands` as a method of the bench: two islands of neighbouring ranks, DDP inside.

Inside an island gradients are averaged exactly in every step. Islands exchange every so many steps. What is evaluated are the
global weights, as with gradwire's local steps.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from benchmarks.campaigns.rivals import every_of
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.methods import Method, allreduce_bytes, gradient_bytes
from gradwire.errors import StepStateError

__all__ = ["IslandsMethod"]


class IslandsMethod(Method):
    """Two islands, with 4 bits between them."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(job, seed, process_group)
        if self.world_size % 2:
            raise StepStateError(f"{self.world_size} ranks make no two islands of equal size. Measure an even number of them.")
        mesh = init_device_mesh("cpu", (2, self.world_size // 2), mesh_dim_names=("between", "inside"))
        self.model = DistributedDataParallel(self.bare_model, process_group=mesh["inside"].get_group())
        plan = gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=every_of(name)))
        self._islands = gw.islands(self.bare_model, self.optimizer, mesh, plan)
        self._inside = self.world_size // 2

    @property
    def bytes_planned(self) -> int:
        stats = self._islands.stats()
        between = stats.wire_bytes // self._islands.every if stats is not None else 0
        return allreduce_bytes(gradient_bytes(self.bare_model), self._inside) + between

    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        with self._islands.global_weights():
            return super().held_out_loss(batches)

    def close(self) -> None:
        self._islands.detach()
