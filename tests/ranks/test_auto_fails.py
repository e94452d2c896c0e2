"""Rank 0 cannot plan: all ranks go on with what they have, or uncompressed, and the log says why. No rank waits."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.auto import adaptive_bits as bits
from gradwire.auto import driver, tuning
from gradwire.core import Identity

DRIVERS: dict[str, tuple[Any, Any, str, str]] = {
    "auto": ("auto", driver, "offers", "plain all-reduce runs on all ranks"),
    "bits": (gw.AdaptiveBits(period=3), bits, "assign", "the bits of all tensors stay unchanged"),
    "sizes": (gw.Tuned(gw.Uniform(gw.QSGD(bits=4))), tuning, "SizeSearch", "the best size so far stays"),
}


def fails(*arguments: object) -> None:
    raise ZeroDivisionError("as ordered")


def train(name: str) -> tuple[str, list[str], str, int]:
    """Steps with a driver whose planning fails on rank 0: the weights, what the log has of exceptions, the plan, the steps."""
    plan, module, planning, _ = DRIVERS[name]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    before = getattr(module, planning)
    if dist.get_rank() == 0:
        setattr(module, planning, fails)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=plan)
    try:
        for step in range(16):
            optimizer.zero_grad()
            model(torch.randn(8, 60, generator=seeded(dist.get_rank(), step))).square().mean().backward()
            optimizer.step()
        specs = {repr(spec) for bucket in handle.plan.buckets for spec in bucket.specs}
        return (
            digest(model.parameters()),
            [each for each in told if "could not plan" in each],
            str(specs),
            handle.stats().steps,
        )
    finally:
        setattr(module, planning, before)
        logging.getLogger("gradwire").removeHandler(handler)
        handle.detach()


@pytest.mark.parametrize("name", DRIVERS)
def test_planning_that_fails_stops_nobody(worlds: Worlds, name: str) -> None:
    (first, told, specs, steps), (second, nothing, others, _) = worlds.run(2, train, name)
    assert first == second and specs == others and steps == 16 and not nothing
    assert told and DRIVERS[name][3] in told[0]
    assert "Traceback" in told[0] and "ZeroDivisionError: as ordered" in told[0]
    if name == "auto":
        assert specs == str({repr(Identity())})
