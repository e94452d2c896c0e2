"""Residuals follow the scale of a GradScaler: what was not sent of a scaled gradient is of the new scale."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw

BACKOFFS = 4


def first_update(policy: Any, scaled: bool) -> tuple[str, float]:
    """The first steps are not finite and do not count, so the scaler halves its scale as often. Digest of the first update that
    counts, and the scale. Without a scaler the script leaves the same updates out."""
    torch.manual_seed(0)
    model = Given([(40, 50), (30, 20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = gw.parallelize(model, optimizer, plan=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
    for step in range(BACKOFFS + 1):
        gradients = model.random_gradients(dist.get_rank(), step)
        if step < BACKOFFS:
            gradients[1][0, 0] = torch.inf
        optimizer.zero_grad()
        scaler.scale(model(gradients)).backward()
        if scaled or step == BACKOFFS:
            scaler.step(optimizer)
            scaler.update()
    handle.flush()
    weights = digest(model.parameters())
    handle.detach()
    return weights, scaler.get_scale()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheme": "allgather"},
        {"residual_dtype": "int8"},
        {"residual_dtype": "bfloat16"},
        {"schedule": "pipelined"},
    ],
    ids=str,
)
def test_after_the_scale_fell_updates_are_those_without_a_scale(worlds: Worlds, options: dict[str, str]) -> None:
    policy = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)), **options)
    plain = worlds.run(2, first_update, policy, False)
    scaled = worlds.run(2, first_update, policy, True)
    assert {weights for weights, _ in scaled} == {weights for weights, _ in plain}
    assert {scale for _, scale in scaled} == {2.0**8}
