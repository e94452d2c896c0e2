"""Averages of weights by Hivemind as a method of the bench: float16 on its wires, with all ranks in each group.

Each rank trains alone, and every so many steps `DecentralizedAverager` makes the weights of all ranks their mean (Ryabinin et al.
2021, Moshpit SGD). Rank 0's node of the DHT is the one that the others know first. What is evaluated are the global weights, as
with gradwire's local steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.campaigns.rivals import every_of
from benchmarks.campaigns.torchft_diloco import own_address
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.methods import Method, gradient_bytes
from gradwire.errors import StepStateError

__all__ = ["HivemindMean"]

_PATIENCE_S = 600.0
"""For all ranks to come to an exchange, and for the exchange."""


class HivemindMean(Method):
    """The mean of weights of Hivemind."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(job, seed, process_group)
        from hivemind import DHT, DecentralizedAverager
        from hivemind.compression import Float16Compression

        self.every, self._steps = every_of(name), 0
        rank = dist.get_rank(process_group)
        place = [f"/ip4/{own_address()}/tcp/0"]
        known: list[Any] = [None]
        if rank == 0:
            self._dht = DHT(start=True, host_maddrs=place)
            known = [[str(each) for each in self._dht.get_visible_maddrs()]]
        dist.broadcast_object_list(known, src=0, group=process_group)
        if rank != 0:
            self._dht = DHT(start=True, host_maddrs=place, initial_peers=known[0])
        self._averager: Any = DecentralizedAverager(
            averaged_tensors=[parameter.detach().clone() for parameter in self.bare_model.parameters()],
            dht=self._dht,
            prefix="bench",
            target_group_size=self.world_size,
            min_group_size=self.world_size,
            compression=Float16Compression(),
            start=True,
        )

    def step(self, batch: Batch) -> float:
        loss = super().step(batch)
        self._steps += 1
        if self._steps % self.every == 0:
            self._exchange()
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        with self._averager.get_tensors() as means:
            for mean, parameter in zip(means, self.bare_model.parameters(), strict=True):
                mean.copy_(parameter)
        group = self._averager.step(timeout=_PATIENCE_S)
        if group is None or len(group) != self.world_size:
            raise StepStateError(f"Hivemind averaged {len(group or ())} of {self.world_size} ranks: its numbers mean nothing.")
        self._take_means()

    def _take_means(self) -> None:
        with self._averager.get_tensors() as means:
            for mean, parameter in zip(means, self.bare_model.parameters(), strict=True):
                parameter.copy_(mean)

    @property
    def bytes_planned(self) -> int:
        ranks = self.world_size  # each sends its parts in float16, and then the mean of its own part
        return 2 * (ranks - 1) * (gradient_bytes(self.bare_model) // 2) // ranks // self.every

    @torch.no_grad()
    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        own = [parameter.clone() for parameter in self.bare_model.parameters()]
        self._take_means()
        try:
            return super().held_out_loss(batches)
        finally:
            for parameter, value in zip(self.bare_model.parameters(), own, strict=True):
                parameter.copy_(value)

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()
