"""DDP's hook and the backend "gradwire" with tensors on the double of streams: bits are those of CPUs, and nothing is early."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_staged_faults import tensors_on_the_double
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Given, Worlds, digest, seeded

import gradwire as gw
from gradwire.integrations import c10d
from gradwire.transport.streams import DeviceStreams


def on(device: bool) -> Any:
    """Tensors are on the double inside, or on the CPU."""
    return tensors_on_the_double(wired=True, shared=False) if device else nullcontext()


def weights_under_the_hook(device: bool) -> tuple[str, bool]:
    """The weights after some steps of DDP, and whether lanes only queued their work."""
    with on(device):
        model = DistributedDataParallel(Given([(60, 50), (20,), (25, 20)], seed=0))  # type: ignore[list-item]
        state = gw.DDPState(gw.QSGD(bits=4))
        model.register_comm_hook(state, gw.ddp_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(model.module.random_gradients(dist.get_rank(), step)).backward()
            optimizer.step()
        queues = state._job.exchange.lanes.queues if state._job is not None else False
        state._job.stop()  # type: ignore[union-attr]
        return digest(model.parameters()), queues


def test_ddp_hook_has_the_weights_of_cpu_ranks(worlds: Worlds) -> None:
    assert worlds.run(2, weights_under_the_hook, True) == [
        (weights, True) for weights, _ in worlds.run(2, weights_under_the_hook, False)
    ]


def sums_of_the_backend(device: bool) -> tuple[str, bool]:
    """Sums of the backend, of which two are under way at once, and whether lanes only queued their work."""
    with on(device), pytest.MonkeyPatch.context() as patch:
        if device:
            patch.setattr(c10d, "_create_work_from_future", lambda future: future)
        c10d.register_model(nn.Module())
        c10d.quantise(min_numel=1000)
        group: Any = dist.new_group(backend="gradwire")
        values = [torch.randn(5000, generator=seeded(dist.get_rank(), at)) for at in range(2)]
        for _ in range(3):
            works = [dist.all_reduce(each, group=group, async_op=True) for each in values]
            for work, each in zip(works, values, strict=True):
                work.wait()
                each.mul_(0.5)
        queues = all(isinstance(lanes.data[0].link.streams, DeviceStreams) for lanes in group._lanes.values())
        group.close()
        dist.destroy_process_group(group)
        return digest(values), queues


def test_backend_has_the_sums_of_cpu_ranks(worlds: Worlds) -> None:
    assert worlds.run(2, sums_of_the_backend, True) == [(sums, True) for sums, _ in worlds.run(2, sums_of_the_backend, False)]
