"""Rows of an embedding that no batch uses stay as they are, as under DDP, with specs that have no code for zero too."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, seeded

import gradwire as gw
from gradwire.core.specs import example_specs
from gradwire.integrations import fsdp2

WITHOUT_ZERO = [gw.SignSGD(), gw.Signum(), gw.EFSignSGD(), gw.OneBit(), gw.ErrorFeedback(gw.QSGD(bits=2, scale="minmax"))]
USED, ROWS = 5, 12


def languages() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, 10), nn.Linear(10, 40), nn.Linear(40, 3))


def drift(model: nn.Module, run: Any, weight: Any) -> tuple[float, float]:
    """20 steps with batches of the first rows. How far the others moved, and those."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = weight().clone()
    for step in range(20):
        optimizer.zero_grad()
        tokens = torch.randint(USED, (8,), generator=seeded(dist.get_rank(), step))
        run(tokens).square().mean().backward()
        optimizer.step()
    moved = (weight() - before).abs().amax(dim=1)
    return float(moved[USED:].max()), float(moved[:USED].max())


def with_a_handle(spec: gw.Spec) -> tuple[float, float, list[str]]:
    model = languages()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = gw.parallelize(model, plan=spec)
    found = drift(model, model, lambda: model[0].weight.detach())
    handle.detach()
    return *found, [str(each.message) for each in caught]


@pytest.mark.parametrize("spec", WITHOUT_ZERO, ids=repr)
def test_unused_rows_stay_with_a_handle(worlds: Worlds, spec: gw.Spec) -> None:
    for unused, used, told in worlds.run(2, with_a_handle, spec):
        assert unused == 0.0 < used
        assert len(told) == 1 and "'0.weight' is sent with QSGD(bits=4" in told[0]


def with_the_hook(spec: gw.Spec) -> tuple[float, float]:
    model = languages()
    run = DistributedDataParallel(model)
    run.register_comm_hook(gw.DDPState(plan=spec), gw.ddp_hook)
    with pytest.warns(UserWarning, match="is an embedding|rows of an embedding"):
        return drift(model, run, lambda: model[0].weight.detach())


def with_fsdp2(spec: gw.Spec) -> tuple[float, float]:
    """The embedding is a module of its own, and then packed with the head."""
    model = languages()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match="rows of an embedding"):
        exchanges = fsdp2.compress(model, spec)
    found = drift(model, model, lambda: model[0].weight.full_tensor().detach())
    exchanges.close()
    return found


@pytest.mark.parametrize("run", [with_the_hook, with_fsdp2])
def test_unused_rows_stay_in_integrations(worlds: Worlds, run: Any) -> None:
    for unused, used in worlds.run(2, run, gw.EFSignSGD()):
        assert unused == 0.0 < used


def by_a_rule() -> tuple[list[str], str]:
    """A rule that names the embedding counts, and the warning says what follows."""
    policy = gw.Policy(default=gw.QSGD(bits=4), rules=[("0.weight", gw.OneBit())])
    with pytest.warns(UserWarning) as caught:
        handle = gw.parallelize(languages(), plan=policy)
    sent = {name: repr(bucket.spec_of(name)) for bucket in handle.plan.buckets for name in bucket.tensors}
    handle.detach()
    return [str(each.message) for each in caught], sent["0.weight"]


def test_a_rule_decides(worlds: Worlds) -> None:
    for told, sent in worlds.run(1, by_a_rule):
        assert sent == "OneBit()"
        assert len(told) == 1 and "rows that no batch uses are changed" in told[0]


SPECS = [each for each in example_specs() if each.id not in ("truncate", "dgc")]


@pytest.mark.parametrize("spec", [*SPECS, *WITHOUT_ZERO, gw.QSGD(bits=3, scale="ls", levels="lloyd")], ids=repr)
def test_which_specs_keep_zeros(spec: gw.Spec) -> None:
    rows = torch.randn(40, 10, generator=seeded(3)) * (torch.arange(40) % 2)[:, None]
    decoded, _ = gw.roundtrip(rows, spec)
    assert bool(decoded[::2].eq(0).all()) == spec.keeps_zeros
