"""Frameworks with `tls=True`: the results of plain connections, by encrypted ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds

import gradwire as gw
from gradwire.integrations import fsdp2
from gradwire.transport import Lanes


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Whether the lanes that are made inside have encrypted connections."""
    found: list[bool] = []
    begin = Lanes.__init__

    def beginning(self: Lanes, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        found.append(self.group.met.encrypts)

    Lanes.__init__ = beginning  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Lanes.__init__ = begin  # type: ignore[method-assign]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 7))


def trained(model: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        run(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in model.parameters()]


def with_hook(encrypts: bool) -> list[torch.Tensor]:
    model = network()
    run = DistributedDataParallel(model)
    run.register_comm_hook(gw.DDPState(plan=gw.Identity(), tls=encrypts), gw.ddp_hook)
    return trained(model, run)


def with_fsdp2(encrypts: bool) -> list[torch.Tensor]:
    model = network()
    fully_shard(model)
    exchanges = fsdp2.compress(model, gw.Identity(), tls=encrypts)
    ends = trained(model, model)
    exchanges.close()
    return ends


def compared(way: Any) -> tuple[list[bool], bool]:
    """Which connections were encrypted; whether weights are equal."""
    with watched() as found:
        plain, encrypted = way(False), way(True)
    return found, all(map(torch.equal, plain, encrypted))


@pytest.mark.parametrize("way", [with_hook, with_fsdp2])
def test_weights_are_those_of_plain_connections(worlds: Worlds, way: Any) -> None:
    assert worlds.run(2, compared, way) == [([False, True], True)] * 2
