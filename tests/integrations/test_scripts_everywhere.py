"""Adapters, frozen layers, experts, tied weights, several models and torch.compile in DDP's hook, FSDP2 and HSDP.

Each script runs with the library alone and with gradwire's uncompressed exchange. DDP's weights are the same bit for bit;
FSDP2's to rounding, since it adds in another order.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, name_of, plain
from integration_scripts import EAGER, SCRIPTS, Script, Wrap, experts, frozen_later
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, mesh_of

import gradwire as gw
from gradwire.integrations import fsdp2


def in_ddp(script: Script, spec: gw.Spec | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    unused = script in (experts, frozen_later)

    def wrap(model: nn.Module) -> nn.Module:
        run = DistributedDataParallel(model, find_unused_parameters=unused)
        if spec is not None:
            run.register_comm_hook(gw.DDPState(spec), gw.ddp_hook)
        return run

    return [each.detach().clone() for model in script(wrap) for each in model.parameters()]


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_ddps_hook_ends_as_ddp(worlds: Worlds, script: Script) -> None:
    theirs, ours, lossy = (worlds.run(2, in_ddp, script, spec) for spec in (None, gw.Identity(), gw.QSGD(bits=4)))
    for rank in range(2):
        assert all(map(torch.equal, ours[rank], theirs[rank]))
    assert all(map(torch.equal, *lossy)), "ranks differ"


def in_fsdp2(script: Script, spec: gw.Spec | None, replicas: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    mesh = mesh_of(2, dist.get_world_size() // 2) if replicas else None
    exchanges = []

    def wrap(model: nn.Module) -> nn.Module:
        if mesh is None:
            run = fully_shard(model)
            exchanges.extend([fsdp2.compress(run, spec)] if spec is not None else [])
        else:
            run = fully_shard(model, mesh=mesh if spec is None else mesh["inside"])
            exchanges.extend([fsdp2.replicate(run, mesh["between"].get_group(), spec)] if spec is not None else [])
        return run

    whole = [each.full_tensor().detach().clone() for model in script(wrap) for each in model.parameters()]
    for each in exchanges:
        each.close()
    return whole


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_fsdp2_ends_as_without_gradwire(worlds: Worlds, script: Script, replicas: bool) -> None:
    ranks = 4 if replicas else 2
    theirs, ours, lossy = (worlds.run(ranks, in_fsdp2, script, spec, replicas) for spec in (None, gw.Identity(), gw.QSGD(bits=4)))
    for own, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, lossy[0], lossy[1])), "ranks differ"


def compiled_autograd(wrap: Wrap) -> str:
    torch._dynamo.reset()
    run = wrap(plain())
    try:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=EAGER)):
            run(batch(0)).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooked(model: nn.Module) -> nn.Module:
    run = DistributedDataParallel(model)
    run.register_comm_hook(gw.DDPState(gw.QSGD(bits=4)), gw.ddp_hook)
    return run


def compressed(model: nn.Module) -> nn.Module:
    run = fully_shard(model)
    fsdp2.compress(run, gw.QSGD(bits=4))
    return run


@pytest.mark.parametrize("wrap", [hooked, compressed])
def test_compiled_autograd_is_refused_with_the_reason(worlds: Worlds, wrap: Wrap) -> None:
    for told in worlds.run(2, partial(compiled_autograd, wrap)):
        assert "ompiled" in told and "utograd" in told, told
