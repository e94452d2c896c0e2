"""A sample of `make soak`."""

import json
import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreters import Interpreters
from worlds import Outcome

from soak import links
from soak.__main__ import KINDS, chosen
from soak.settings import HOOK, INTEGRATIONS, SCHEDULES
from soak.stage import NotStarted
from soak.training import End

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sample_of_the_faults(interpreters: Interpreters, tmp_path: Path) -> None:
    """Pairs of a kind of fault and a schedule, and some thousand steps."""
    faults, steps = 150, 3000
    summary = soak(interpreters, tmp_path, faults=faults, steps=steps, seed=100)
    assert len(summary["kinds"]) + len(summary["not_possible_here"]) == 23
    assert {schedule for row in summary["pairs"].values() for schedule in row} == {
        "backward", "pipelined", "sharded", "delayed", "local", "auto", "ddp hook",
        "fsdp2", "accelerate", "transformers", "lightning", "c10d",
    }  # fmt: skip
    assert summary["compared"] >= 0.4 * faults
    # now and then a busy machine keeps ranks from their first step, but not in one trial of ten
    assert summary["started_again"] <= 0.075 * faults
    (run,) = summary["endurance"]
    assert run["drift_checks"] == steps // 100 and run["passed"]


def test_forty_faults_have_every_kind_and_every_schedule() -> None:
    possible = KINDS.keys() - (() if links.possible() else links.OF_LINKS)
    for seed in range(20):
        options = Namespace(faults=40, seed=seed, only="", schedules="")
        kinds, schedules, seeds = zip(*chosen(options), strict=True)
        assert set(kinds) == possible and set(schedules) == {*SCHEDULES, HOOK, *INTEGRATIONS}
        assert sorted(seeds) == [*range(seed, seed + 40)]


def test_a_few_faults(interpreters: Interpreters, tmp_path: Path) -> None:
    """Some pairs of a kind and a schedule; frameworks, which take seconds to load, are in the larger sample."""
    summary = soak(interpreters, tmp_path, faults=8, steps=0, seed=7, schedules=",".join([*SCHEDULES, HOOK]))
    assert summary["faults"] == summary["passed_faults"] == 8 and summary["compared"] > 0


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (
            "raised",
            "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5000ms for send",
            True,
        ),
        (
            "raised",
            "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7065",
            True,
        ),
        ("raised", "ValueError: Timed out", False),
        ("silent", "it did not answer", False),
        ("died", "exit code 1", False),
    ],
)
def test_only_ranks_that_all_waited_are_started_again(kind: str, value: str, told: bool) -> None:
    end = End("CommunicationError", "step 0: rank 1 waited for rank 0's parameters", at=0.0, step=-1)
    assert NotStarted(1, [Outcome("returned", end), Outcome(kind, value)]).told is told
    wrong = Outcome("returned", replace(end, kind="DisagreementError"))
    assert not NotStarted(1, [Outcome(kind, value), wrong]).told


def soak(interpreters: Interpreters, tmp_path: Path, **options: object) -> dict[str, Any]:
    """The summary of a run, which passed."""
    command = [sys.executable, "-m", "soak", *(f"--{name}={value}" for name, value in options.items())]
    paths = [str(TESTS), str(TESTS / "support"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = interpreters.run(
        [*command, "--json", str(tmp_path / "soak.json")],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    summary: dict[str, Any] = json.loads((tmp_path / "soak.json").read_text())
    assert summary["passed"]
    return summary
