"""PyTorch's own tests of process groups with gradwire in gloo's place.

    python -m benchmarks torch_tests [--ranks 2] [--only WORD ...]

The tests are those that the installed torch brings, on CPUs, in three places: gloo alone, the backend "gradwire" wherever a test
asks for gloo, and the hook with `gw.Identity()` in every DistributedDataParallel. In the second place sums of 16,384 elements and
more are quantised, as always. Tests that need GPUs, more ranks or other backends skip themselves. Each test has a limit of a
minute. Not run: torch's tests of remote calls that make no process group, and tests that are not in torch's wheel (those of
FSDP2).

The counts go to benchmarks/results/torch_tests.json, unless --only is given. Returns 1 where a test passes with gloo alone, not
with gradwire, and does not ask for gloo by name.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table

PLACES = {
    "gloo": "gloo",
    "backend": 'the backend "gradwire"',
    "hook": "DDP with `gw.ddp_hook`",
    "auto hook": "DDP with `gw.ddp_hook` and auto",
}
SECONDS_OF_A_TEST = 60
COLUMNS = ("with", "gloo passes", "also pass", "ask for gloo by name", "lost")

_MONITORED = ("distributed/distributed_c10d.py", "monitored_barrier is only implemented for GLOO backend.")
ASK_FOR_GLOO = {
    "test_get_backend": ("testing/_internal/distributed/distributed_test.py", "assertEqual(dist.get_backend(), backend_str)"),
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
}
"""Tests that no other backend can pass, and the line of torch that asks for gloo."""

Outcomes = dict[str, tuple[str, str]]
"""The end of each test, and its reason."""


def run(arguments: Sequence[str]) -> int:
    """Run all places and compare them; 1 if gradwire fails where gloo passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks torch_tests")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="words; tests with one of them in their names")
    options = parser.parse_args(arguments)
    found = outcomes(options.ranks, options.only)
    compared = {place: beside(found["gloo"], found[place]) for place in PLACES}
    rows = [(PLACES[place], *(len(each[column]) for column in COLUMNS[1:])) for place, each in compared.items()]
    print("\n".join(table(COLUMNS, rows, left=1)))
    for place, each in compared.items():
        for column in COLUMNS[3:]:
            for name in each[column]:
                print(f"{place}: {column}: {name}: {found[place][name][1]}")
    if not options.only:
        about = {
            "torch": torch.__version__,
            "ranks": options.ranks,
            "counts": {place: {column: len(names) for column, names in each.items()} for place, each in compared.items()},
            "skipped with gloo": sum(how == "skipped" for how, _ in found["gloo"].values()),
            "failed with gloo": {name: why for name, (how, why) in found["gloo"].items() if how == "failed"},
            "ask for gloo by name": {name: line_of(*where) for name, where in ASK_FOR_GLOO.items()},
            "lost": {place: {name: found[place][name][1] for name in each["lost"]} for place, each in compared.items()},
            "passed with gloo": sorted(compared["gloo"]["also pass"]),
            "passed with the hook": sorted(compared["hook"]["also pass"]),
        }
        write(RESULTS / "torch_tests.json", about)
    return int(any(each["lost"] for each in compared.values()))


def beside(gloo: Outcomes, place: Outcomes) -> dict[str, list[str]]:
    """The place's tests that pass with gloo, and what becomes of them."""
    passed = [name for name in place if gloo[name][0] == "passed"]
    also = [name for name in passed if place[name][0] == "passed"]
    named = [name for name in passed if name not in also and name in ASK_FOR_GLOO]
    lost = [name for name in passed if name not in also and name not in named]
    return dict(zip(COLUMNS[1:], (passed, also, named, lost), strict=True))


def line_of(file: str, words: str) -> str:
    """Return the place of the words in the installed torch: `file:line`. Raises SystemExit if the file does not contain
    them any more."""
    lines = (Path(torch.__file__).parent / file).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if words in line:
            return f"torch/{file}:{number}"
    raise SystemExit(f"torch/{file} has no longer {words!r}. Look whether the test asks for gloo by name.")


def outcomes(ranks: int, only: Sequence[str] = ()) -> dict[str, Outcomes]:
    """The tests' outcomes in each place. In the hook's place those that build a model of DDP and register no other hook."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        environment = {
            "BACKEND": "gloo", "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_OF_A_TEST),
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }  # fmt: skip
        runner = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.torch_test_cases", str(told), ",".join(PLACES), *only],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # with all that the tests start, which ends with it
        )
        try:
            code = runner.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()
        lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    if code or not lines:
        raise SystemExit(f"the tests ended with exit code {code} after {len(lines)} tests.")
    return {place: {line["test"]: (line["how"], line["why"]) for line in lines if line["place"] == place} for place in PLACES}
