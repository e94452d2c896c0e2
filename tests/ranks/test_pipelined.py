"""The pipelined schedule learns the same model as plain DDP and as the backward schedule, whatever scripts do between steps."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from threads import Threads, built, here
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest, seeded

import gradwire as gw

PLAIN = gw.Identity()
LOSSY = gw.ErrorFeedback(gw.QSGD(bits=4))
SMALL = 2000
"""Bytes of a bucket: models here have several."""


def policy(spec: Any, schedule: str | gw.Pipelined) -> gw.Policy:
    return gw.Uniform(spec, schedule=schedule, scheme="alltoall", bucket_bytes=SMALL, edge_bytes=SMALL, chunk_bytes=1024)


class Tied(nn.Module):
    """With tied weights, a module that is called twice, attention (whose inner Linear is never called), one that is skipped
    in every third step, an unused one, and layers whose order changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, step: int) -> torch.Tensor:
        x = self.embed(words) * self.scale
        layers = [self.first, self.second, self.first]
        for layer in layers if step % 2 else layers[::-1]:
            x = x + torch.tanh(layer(x))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        if step % 3:
            x = self.sometimes(x)
        return nn.functional.linear(x, self.head.weight)


def words(step: int) -> torch.Tensor:
    return torch.randint(20, (4, 5), generator=seeded(here.rank, step))


def tied() -> Tied:
    return built(0, Tied)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": vectors, "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def loss_of(run: Any, step: int) -> torch.Tensor:
    guessed = run(words(step), step)
    return nn.functional.cross_entropy(guessed.flatten(0, 1), words(step).flatten())


def train(kind: str, make: Make, steps: int, spec: Any = PLAIN) -> list[str]:
    """The weights after these steps, and the optimizer's state."""
    model = tied()
    optimizer = make(model)
    run: Any = model
    if kind == "ddp":
        run = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        handle = gw.parallelize(model, optimizer, plan=policy(spec, kind), process_group=here.group)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for step in range(steps):
        loss_of(run, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    ends = [digest(model.parameters()), digest(state_of(optimizer))]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if kind != "ddp":
        handle.detach()
    return ends


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def compare(make: Make, steps: int, spec: Any, kinds: tuple[str, str]) -> list[list[str]]:
    return [train(kind, make, steps, spec) for kind in kinds]


@pytest.mark.parametrize("make", [momentum, adam, adamw, fused])
def test_two_ranks_are_as_under_ddp(worlds: Worlds, make: Make) -> None:
    both = worlds.run(2, compare, make, 20, PLAIN, ("pipelined", "ddp"))
    assert both[0] == both[1], "ranks differ"
    assert both[0][0] == both[0][1]


@pytest.mark.parametrize(("ranks", "spec"), [(3, PLAIN), (4, LOSSY), (2, LOSSY)])
def test_any_ranks_are_as_in_the_backward_schedule(worlds: Worlds, ranks: int, spec: Any) -> None:
    ends = worlds.run(ranks, compare, momentum, 12, spec, ("pipelined", "backward"))
    assert all(rank == ends[0] for rank in ends), "ranks differ"
    assert ends[0][0] == ends[0][1]


# ---- a model that is dropped while a part of it lives on


def backbone_of(schedule: Any) -> str:
    """The weights of a part whose model was dropped right after the last step."""

    def train() -> nn.Module:
        model = built(0, lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = gw.Uniform(gw.Identity(), scheme="alltoall", schedule=schedule, bucket_bytes=1000)
        gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        for step in range(4):
            model(torch.randn(8, 20, generator=seeded(here.rank, step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[0]

    part = train()
    gc.collect()
    return digest([part.weight.detach() + 0, part.bias.detach() + 0])


def test_a_part_of_a_dropped_model_has_the_last_step(threads: Threads) -> None:
    expected = threads.run(2, backbone_of, "backward")
    for schedule in ("pipelined", gw.Pipelined(shard_optimizer=True)):
        assert threads.run(2, backbone_of, schedule) == expected
