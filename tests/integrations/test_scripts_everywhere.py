"""Adapters, frozen layers, experts, tied weights, several models and torch.compile in DDP's hook, FSDP2 and HSDP.

Each script runs with the library alone and with gradwire's uncompressed exchange. DDP's weights are the same bit for bit;
FSDP2's to rounding, since it adds in another order.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, name_of, plain, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds

import gradwire as gw
from gradwire.integrations import fsdp2

Wrap = Callable[[nn.Module], Any]
Script = Callable[[Wrap], Iterable[nn.Module]]
EAGER = "aot_eager"


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 8), nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.base(x) + self.up(self.down(x))).tanh())


class Tied(nn.Module):
    """The weight of the first layer is that of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(6, 8, bias=False), nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.into(x)).tanh())


class Experts(nn.Module):
    """A gate, and experts of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.gate(x).tanh())


def of_model(make: Callable[[], nn.Module], wrap: Wrap) -> Iterable[nn.Module]:
    model = make()
    run, optimizer = wrap(model), sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        optimizer.step()
    return [model]


def adapters(wrap: Wrap) -> Iterable[nn.Module]:
    return of_model(Adapted, wrap)


def tied_weights(wrap: Wrap) -> Iterable[nn.Module]:
    return of_model(Tied, wrap)


def experts(wrap: Wrap) -> Iterable[nn.Module]:
    model = Experts()
    run, optimizer = wrap(model), sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        run(batch(step), step % 3).square().mean().backward()
        optimizer.step()
    return [model]


def frozen_later(wrap: Wrap) -> Iterable[nn.Module]:
    model = plain()
    run, optimizer = wrap(model), sgd(model)
    for step in range(6):
        model[0].requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        optimizer.step()
    return [model]


def gan(wrap: Wrap) -> Iterable[nn.Module]:
    """The backward of the generator leaves gradients in the discriminator, which are zeroed."""
    generator, discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)), plain()
    generate, judge = wrap(generator), wrap(discriminator)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    for step in range(4):
        of_discriminator.zero_grad()
        fake = judge(generate(batch(3 * step, 4, 4)).detach()).square().mean()
        (fake - judge(batch(3 * step + 1, 4, 6)).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (-judge(generate(batch(3 * step + 2, 4, 4))).mean()).backward()
        of_generator.step()
    return [generator, discriminator]


def actor_and_critic(wrap: Wrap) -> Iterable[nn.Module]:
    """One backward of both losses."""
    actor, critic = plain(), plain()
    act, judge = wrap(actor), wrap(critic)
    optimizers = sgd(actor), sgd(critic)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        values = judge(batch(step))
        advantage = (batch(step).mean(1, keepdim=True) - values).detach()
        ((act(batch(step)).log_softmax(-1) * advantage).mean() + values.square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [actor, critic]


def teacher_and_student(wrap: Wrap) -> Iterable[nn.Module]:
    """The teacher is not wrapped and does not train."""
    torch.manual_seed(8)
    teacher, student = plain().requires_grad_(False), plain()
    run, optimizer = wrap(student), sgd(student)
    for step in range(5):
        optimizer.zero_grad()
        (run(batch(step)) - teacher(batch(step))).square().mean().backward()
        optimizer.step()
    return [student]


def compiled_model(wrap: Wrap) -> Iterable[nn.Module]:
    torch._dynamo.reset()
    return of_model(plain, lambda model: torch.compile(wrap(model), backend=EAGER))


def compiled_blocks(wrap: Wrap) -> Iterable[nn.Module]:
    torch._dynamo.reset()

    def make() -> nn.Module:
        model = plain()
        for block in model:
            block.compile(backend=EAGER)
        return model

    return of_model(make, wrap)


SCRIPTS = [
    adapters,
    tied_weights,
    experts,
    frozen_later,
    gan,
    actor_and_critic,
    teacher_and_student,
    compiled_model,
    compiled_blocks,
]


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
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("between", "inside")) if replicas else None
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
