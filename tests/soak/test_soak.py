"""A sample of `make soak`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_sample_of_the_faults(tmp_path: Path) -> None:
    """Every kind of fault, and some hundred steps; two minutes on two cores."""
    summary = soak(tmp_path, kills=10, trials=13, steps=600)
    assert len(summary["faults"]) + len(summary["not_possible_here"]) == 12


@pytest.mark.slow
def test_a_few_faults(tmp_path: Path) -> None:
    summary = soak(tmp_path, kills=2, trials=2, steps=0)
    assert len(summary["faults"]) == 3


def soak(tmp_path: Path, kills: int, trials: int, steps: int) -> dict[str, Any]:
    """The summary of a run, which passed."""
    numbers = {"--kills": kills, "--trials": trials, "--steps": steps}
    command = [sys.executable, "-m", "soak", *(str(word) for pair in numbers.items() for word in pair)]
    paths = [str(TESTS), str(TESTS / "support"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    summary: dict[str, Any] = json.loads((tmp_path / "soak.json").read_text())
    assert summary["passed"]
    return summary
