"""A sample of `make soak`."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_a_sample_of_the_faults(tmp_path: Path) -> None:
    """Every kind of fault, and some hundred steps; two minutes on two cores."""
    command = [sys.executable, "-m", "soak", "--kills", "10", "--trials", "13", "--steps", "600"]
    run = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'support'}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    summary = json.loads((tmp_path / "soak.json").read_text())
    assert summary["passed"]
    assert len(summary["faults"]) + len(summary["not_possible_here"]) == 12
