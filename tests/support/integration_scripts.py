"""Training scripts that run in every integration: adapters, experts, tied weights, several models, torch.compile.

A script takes the function that wraps a model, trains, and returns its models.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from beside_ddp import batch, plain, sgd
from torch import nn

__all__ = ["EAGER", "SCRIPTS", "Adapted", "Experts", "Script", "Tied", "Wrap", "experts", "frozen_later"]

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
