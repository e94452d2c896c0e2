"""Clipping in the pipelined schedule by the norm of shards: torch's norm and weights, and gathers go on meanwhile."""

import math
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_pipelined import LOSSY, PLAIN, policy
from threads import Threads, built, here
from torch import nn
from worlds import seeded

import gradwire as gw
from gradwire.engine.schedules import pipelined

STEPS = 6
MAX_NORM = 0.05
LOOKS = 3
"""The step in which rank 0 looks at a gradient before it clips."""


def trained(schedule: str, spec: Any, by_torch: bool) -> tuple[list[float], torch.Tensor, list[int]]:
    """Norms, the weights at the end, and after each clipping how many buckets were still under way."""
    layers = built(0, lambda: [nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 3)])
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    handle = gw.parallelize(model, optimizer, plan=policy(spec, schedule), process_group=here.group)
    norms, under_way = [], []
    for step in range(STEPS):
        inputs = torch.randn(8, 20, generator=seeded(here.rank, step))
        model(inputs).square().mean().backward()
        if step == LOOKS and here.rank == 0:
            assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
        clip = partial(nn.utils.clip_grad_norm_, model.parameters()) if by_torch else handle.clip_grad_norm_
        norms.append(clip(MAX_NORM).item())
        under_way.append(len(handle.session.schedule._gathers.under_way) if schedule == "pipelined" else 0)
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    handle.detach()
    return norms, weights, under_way


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_norm_of_shards_is_torchs(threads: Threads, ranks: int) -> None:
    usual = threads.run(ranks, trained, "backward", PLAIN, True)
    ours = threads.run(ranks, trained, "pipelined", PLAIN, False)
    for (norms, weights, _), (expected, right, _) in zip(ours, usual, strict=True):
        assert min(expected) > MAX_NORM, "nothing is clipped"
        assert norms == pytest.approx(expected, rel=1e-6)
        assert (weights - right).norm() <= 1e-5 * right.norm()
        assert torch.equal(weights, ours[0][1])
    for _, _, under_way in ours:
        # where one rank has looked all clip as torch does
        assert [bool(buckets) for buckets in under_way] == [step != LOOKS for step in range(STEPS)]


def test_compressed_gradients_are_clipped_as_they_arrive(threads: Threads) -> None:
    usual = threads.run(2, trained, "backward", LOSSY, True)
    for (norms, weights, under_way), (expected, right, _) in zip(
        threads.run(2, trained, "pipelined", LOSSY, False), usual, strict=True
    ):
        assert norms == expected and torch.equal(weights, right)
        assert not any(under_way)


def norm_and_messages(power: float) -> tuple[float, int]:
    """The norm of one number of each rank, and how many bytes this rank handed over for it."""
    link = here.group.meet(timedelta(seconds=20)).connect("norm", torch.device("cpu"), timedelta(seconds=20))[0]
    handed = []
    counted = SimpleNamespace(
        world_size=here.group.world_size,
        rank=here.rank,
        all_gather=lambda into, own: handed.append(own.numel()) or link._allgather_base(into, own),
    )
    return pipelined._norm(counted, 1.1**here.rank, power), sum(handed)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5, math.inf])
def test_a_rank_tells_two_numbers_for_a_norm(threads: Threads, power: float) -> None:
    expected = float(torch.linalg.vector_norm(torch.tensor([1.1**rank for rank in range(3)], dtype=torch.float64), power))
    assert threads.run(3, norm_and_messages, power) == [(expected, 2)] * 3
