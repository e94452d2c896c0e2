"""Auto from its first step: when it has decided, whether it was ever behind DDP by then, and whether its choice is the best.

    python -m benchmarks first [--only transformer/unlimited mlp/1000mbit/2] [--seconds 20] [--again]

A cell is JOB/LINK/NODES; `--only` takes parts of names. Job `gpt2` is a GPT-2 of transformers with 7.4 M parameters, on random
tokens. In each cell DDP, DDP with 2 MB buckets, `plan="auto"` and every spec that auto may choose train for equal seconds, in
turns, all from their first step. *Behind* is the time of auto's first n steps over n median steps of the better DDP, at n = 20
and at the worst n from 20 on, with a 95 % interval from resampled steps of DDP. *Over the best* is the median step of auto's
choice over that of the fastest method. Needs network namespaces.

Each cell is written to benchmarks/results/first.json at once, and is not measured again while it stands there (--again does). 1
if a decision came late, if auto was behind by more than 2 %, or if its choice is more than 3 % slower than the best.
"""

import argparse
import json
import sys
from itertools import accumulate, product
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from gradwire.auto.trial import BUDGET_PLAIN_STEPS, LEAST_BUDGET_US, MOST_STEPS
from gradwire.bench.names import GivenModel
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import Cell
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench

PATH = RESULTS / "first.json"
RIVALS, AUTO = ("ddp", "ddp-2mb"), "gradwire:auto"
CANDIDATES = ("gradwire:identity", "gradwire:qsgd4", "gradwire:qsgd2-ef")
"""What auto chooses from."""
JOBS, LINKS, NODES = ("transformer", "mlp", "resnet", "gpt2"), ("100mbit", "500mbit", "1000mbit", "unlimited"), (2, 4)
GPT2 = GivenModel(
    model="transformers:GPT2LMHeadModel",
    config="n_layer=6,n_embd=320,n_head=5,vocab_size=128,n_positions=64",
    input="4x64",
)
FIRST_STEP, MOST_BEHIND, MOST_OVER_BEST = 20, 1.02, 1.03
RESAMPLES = 1000
COLUMNS = (
    "job",
    "link",
    "nodes",
    "DDP, ms",
    "decided in",
    "seconds",
    "behind at 20",
    "at worst",
    "steps over DDP's",
    "over the best",
    "runs",
)


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if a decision came late, or if auto was behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of JOB/LINK/NODES")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--again", action="store_true", help="measure what is already known, too")
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"first: not measured, {problem}")
        return 0
    cells = {f"{job}/{link}/{nodes}": (job, link, nodes) for job, link, nodes in product(JOBS, LINKS, NODES)}
    known: dict[str, Any] = json.loads(PATH.read_text()).get("cells", {}) if PATH.exists() else {}
    chosen = [name for name in cells if any(part in name for part in options.only)]
    for name in chosen if options.again else [name for name in chosen if name not in known]:
        if (found := measured(*cells[name], options.seconds)) is not None:
            known[name] = found
            write(PATH, {"most_behind": MOST_BEHIND, "cells": known})
    rows = [(cell, known[cell]) for cell in cells if cell in known]
    print("\n".join(table(COLUMNS, [_row(*each) for each in rows])))
    return int(any(_misses(row) for _, row in rows))


def measured(job: str, link: str, nodes: int, seconds: float) -> dict[str, Any] | None:
    """One cell; None if a method failed, which is told."""
    request = BenchRequest(
        jobs=[job],
        links=[link],
        methods=[*RIVALS, AUTO, *CANDIDATES],
        model=GPT2 if job == "gpt2" else None,
        nodes=nodes,
        race_s=seconds,
        alone_steps=0,
    )
    found = run_bench(request, None, ProgressView(Console(stderr=True)))
    for failure in found.failures:
        print(failure, file=sys.stderr)
    return None if found.failures else judged({cell.method: cell for cell in found.cells})


def _misses(row: dict[str, Any]) -> bool:
    """Whether a decision came late, auto was behind, or its choice is not the best."""
    late = row["decided_steps"] is None or row["decided_s"] > row["most_s"]
    return late or row["worst"][1] > MOST_BEHIND or row["over_best"] > MOST_OVER_BEST


def judged(cells: dict[str, Cell]) -> dict[str, Any]:
    """What a cell says: times in seconds; ratios as (middle, low, high)."""
    rivals = {name: cells[name].step_us[slice(*cells[name].counted)] for name in RIVALS}
    auto = cells[AUTO]
    ends = list(accumulate(auto.step_us))
    better = min(rivals, key=lambda name: float(np.median(rivals[name])))
    plain_us = float(np.median(rivals[better]))
    chance = np.random.default_rng(0)
    steps = np.asarray(rivals[better])
    medians = np.median(steps[chance.integers(len(steps), size=(RESAMPLES, len(steps)))], axis=1)

    def behind(count: int) -> tuple[float, float, float]:
        low, high = np.percentile(ends[count - 1] / count / medians, [2.5, 97.5])
        return ends[count - 1] / count / plain_us, float(low), float(high)

    auto_us = _counted_us(auto)
    counts = range(min(FIRST_STEP, len(ends)), len(ends) + 1)
    first = auto.decided[0] if auto.decided else None
    return {
        "ddp_ms": plain_us / 1e3,
        "better": better,
        "decided_steps": None if first is None else first.step,
        "decided_s": None if first is None else ends[first.step - 1] / 1e6,
        "most_s": max(LEAST_BUDGET_US, BUDGET_PLAIN_STEPS * plain_us) / 1e6,
        "at_20": behind(counts[0]),
        "worst": max(map(behind, counts)),
        "gain": plain_us / auto_us,
        "over_best": auto_us / min(plain_us, *(_counted_us(cells[name]) for name in CANDIDATES)),
        "chosen": None if first is None else auto.decided[-1].chosen,
        "decisions": len(auto.decided),
        "steps": len(ends),
    }


def _counted_us(cell: Cell) -> float:
    return float(np.median(cell.step_us[slice(*cell.counted)]))


def _row(cell: str, row: dict[str, Any]) -> tuple[str, ...]:
    middle, low, high = row["worst"]
    decided = "-" if row["decided_steps"] is None else f"{row['decided_steps']} of {MOST_STEPS} steps"
    seconds = "-" if row["decided_s"] is None else f"{row['decided_s']:.1f} of {row['most_s']:.1f}"
    return (
        *cell.split("/"),
        f"{row['ddp_ms']:.0f}",
        decided,
        seconds,
        f"{row['at_20'][0]:.2f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
        f"{row['gain']:.2f}",
        f"{row['over_best']:.2f}",
        row["chosen"] or "-",
    )
