"""torchft's DiLoCo as a method of the bench: float32 on gloo, as its documentation sets it up.

Each rank is a replica group of its own with one member, since ranks train apart. Rank 0 hosts torchft's lighthouse. What is
evaluated are the global weights, as with gradwire's local steps.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from benchmarks.campaigns.rivals import outer_of
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.loopback import LOOPBACK
from gradwire.bench.methods import Method, allreduce_bytes, gradient_bytes
from gradwire.errors import StepStateError

_PATIENCE = timedelta(hours=1)
"""Other methods take their turns between two exchanges."""


class TorchftDiLoCo(Method):
    """DiLoCo of torchft."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(job, seed, process_group)
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self.every, rate, momentum = outer_of(name)
        self._steps = 0
        rank, address = dist.get_rank(process_group), own_address()
        self._lighthouse: Any = None
        url: list[Any] = [None]
        if rank == 0:
            heartbeat_ms = round(_PATIENCE.total_seconds() * 1e3)
            self._lighthouse = LighthouseServer(
                bind=f"{address}:0", min_replicas=self.world_size, heartbeat_timeout_ms=heartbeat_ms
            )
            url = [f"http://{address}:{urlsplit(self._lighthouse.address()).port}"]
        dist.broadcast_object_list(url, src=0, group=process_group)
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.world_size,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=url[0],
            replica_id=f"rank{rank}",
            hostname=address,
            heartbeat_interval=timedelta(seconds=1),
            init_sync=False,  # all ranks have the same weights
        )
        outer = torch.optim.SGD(self.bare_model.parameters(), rate, momentum, nesterov=momentum > 0)
        self._diloco = DiLoCo(self._manager, [self.bare_model], self.optimizer, outer, sync_every=self.every)
        self._diloco.__enter__()

    def step(self, batch: Batch) -> float:
        self._steps += 1
        return super().step(batch)

    @property
    def bytes_planned(self) -> int:
        return allreduce_bytes(gradient_bytes(self.bare_model), self.world_size) // self.every

    @torch.no_grad()
    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        own = [parameter.clone() for parameter in self.bare_model.parameters()]
        for fragment in self._diloco._fragments:
            fragment.restore_parameters()
        try:
            return super().held_out_loss(batches)
        finally:
            for parameter, value in zip(self.bare_model.parameters(), own, strict=True):
                parameter.copy_(value)

    def check(self) -> None:
        exchanges = self._manager.current_step()
        if exchanges != self._steps // self.every:
            raise StepStateError(
                f"torchft made {exchanges} exchanges in {self._steps} steps, where every {self.every} steps ask for "
                f"{self._steps // self.every}: some were not committed, so its numbers mean nothing. See its log."
            )

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def own_address() -> str:
    """Return the address at which other ranks reach this one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    addresses = psutil.net_if_addrs()[interface]
    return next(str(each.address) for each in addresses if each.family is socket.AF_INET)
