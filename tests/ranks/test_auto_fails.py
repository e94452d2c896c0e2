"""Rank 0 cannot plan: all ranks go on with what they have, or uncompressed, and the log says why. No rank waits."""

import logging
import os
import pwd
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.auto import adaptive_bits as bits
from gradwire.auto import driver, tuning
from gradwire.core import Identity
from gradwire.profiler import codecs

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


def nobody(user: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {user}")


def decides(home: str) -> tuple[str, str]:
    """The first decision, and where the machine's times of codecs would be kept. home: '' for a user whom the system does not
    know, without the variable HOME."""
    names = ("GRADWIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    kept = {name: value for name, value in os.environ.items() if name not in names} | ({"HOME": home} if home else {})
    with mock.patch.dict(os.environ, kept, clear=True), mock.patch.object(pwd, "getpwuid", nobody):
        try:
            folder = str(codecs._folder())
        except RuntimeError:
            folder = ""
        model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        handle = gw.parallelize(model)
        for step in range(60):
            model(torch.randn(8, 60, generator=seeded(dist.get_rank(), step))).square().mean().backward()
            if handle.decision is not None:
                break
        decision = handle.decision
        handle.detach()
    return str(decision), folder


@pytest.mark.parametrize("home", ["unset", "not a folder", "read-only"])
def test_auto_decides_for_users_without_a_home(worlds: Worlds, tmp_path: Path, home: str) -> None:
    file = tmp_path / "file"
    file.touch()
    # nobody can make a folder in /proc, not even the superuser
    path = {"unset": "", "not a folder": str(file), "read-only": "/proc"}[home]
    for decision, folder in worlds.run(2, decides, path):
        assert "ms" in decision and "could not plan" not in decision
        assert folder == (f"{path}/.cache/gradwire" if path else "")
