"""Auto from its first step: when it has decided, and whether it was ever behind DDP by then.

    python -m benchmarks first [--jobs transformer mlp resnet] [--links 100mbit 500mbit 1000mbit unlimited] [--nodes 2 4]
                               [--seconds 20]

In each cell DDP, DDP with 2 MB buckets and `plan="auto"` train for equal seconds, in turns, all from their first step. *Behind*
is the time of auto's first n steps over n median steps of the better DDP, at n = 20 and at the worst n from 20 on, with a 95 %
interval from resampled steps of DDP. Needs network namespaces. About 80 seconds a cell of 20.

What is measured goes to benchmarks/results/first.json. 1 if a decision came late, or if auto was behind by more than 2 %.
"""

import argparse
import sys
from itertools import accumulate
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from gradwire.auto.trial import BUDGET_PLAIN_STEPS, LEAST_BUDGET_US, MOST_STEPS
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import Cell
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench

PATH = RESULTS / "first.json"
RIVALS, AUTO = ("ddp", "ddp-2mb"), "gradwire:auto"
FIRST_STEP, MOST_BEHIND = 20, 1.02
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
    "runs",
)


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if a decision came late, or if auto was behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first")
    parser.add_argument("--jobs", nargs="+", default=["transformer", "mlp", "resnet"])
    parser.add_argument("--links", nargs="+", default=["100mbit", "500mbit", "1000mbit", "unlimited"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"first: not measured, {problem}")
        return 0
    rows: list[dict[str, Any]] = []
    for nodes in options.nodes:
        request = BenchRequest(
            jobs=options.jobs,
            links=options.links,
            methods=[*RIVALS, AUTO],
            nodes=nodes,
            race_s=options.seconds,
            alone_steps=0,
        )
        found = run_bench(request, None, ProgressView(Console(stderr=True)))
        for failure in found.failures:
            print(failure, file=sys.stderr)
        for job in options.jobs:
            for link in options.links:
                cells = {name: found.cell(job, link, name) for name in request.methods}
                if all(cell is not None and cell.failure is None for cell in cells.values()):
                    rows.append({"job": job, "link": link, "nodes": nodes} | judged(cells))  # type: ignore[arg-type]
    write(PATH, {"most_behind": MOST_BEHIND, "rows": rows})
    print("\n".join(table(COLUMNS, [_row(row) for row in rows])))
    late = any(row["decided_steps"] is None or row["decided_s"] > row["most_s"] for row in rows)
    return int(late or any(row["worst"][1] > MOST_BEHIND for row in rows))


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
        "gain": plain_us / float(np.median(auto.step_us[slice(*auto.counted)])),
        "chosen": None if first is None else auto.decided[-1].chosen,
        "decisions": len(auto.decided),
        "steps": len(ends),
    }


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    middle, low, high = row["worst"]
    decided = "-" if row["decided_steps"] is None else f"{row['decided_steps']} of {MOST_STEPS} steps"
    seconds = "-" if row["decided_s"] is None else f"{row['decided_s']:.1f} of {row['most_s']:.1f}"
    return (
        row["job"],
        row["link"],
        str(row["nodes"]),
        f"{row['ddp_ms']:.0f}",
        decided,
        seconds,
        f"{row['at_20'][0]:.2f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
        f"{row['gain']:.2f}",
        row["chosen"] or "-",
    )
