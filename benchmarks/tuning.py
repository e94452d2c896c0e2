"""Compares Bayesian optimisation of the bucket size on live jobs with random search and the best of a grid (DeAR,
section IV-B).

    python -m benchmarks tuning [--jobs mlp resnet transformer] [--links 100mbit 500mbit] [--again]

Two nodes, `gw.Pipelined()`, uncompressed, buckets all alike. In each cell (a job over a link):

1. The grid, live: up to 12 groupings of tensors that sizes from 1 to 100 MB make, in turns, several rounds.
2. `gw.Tuned(search="bayes")`, live, from 100 MB, which is one bucket, in at most 10 trials.
3. Random search, ten runs with as many trials, on the grid's times, interpolated over the logarithm of the size: ten live runs
   would take hours.
4. What the optimisation chose, the best of the grid, and the start, live, in turns.

Fifteen minutes. Needs network namespaces. What is measured goes to benchmarks/results/tuning.json at once and is not measured
again while it stands there (--again does); the table is written into docs/schedules_measured.md. 1 if a choice is more than
5 % slower than the best of the grid, or worse than random search's median.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import gradwire as gw
from benchmarks import markdown
from benchmarks.common import RESULTS, collected, write, write_between
from gradwire.auto.live import Live
from gradwire.auto.sizes import SizeSearch
from gradwire.bench.jobs import Job, make_job
from gradwire.bench.ranks import Ranks
from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster

PATH = RESULTS / "tuning.json"
PAGE = Path(__file__).parent.parent / "docs" / "schedules_measured.md"
BEGIN, END = "<!-- tuning: made by `python -m benchmarks tuning` -->", "<!-- end of tuning -->"
MB = 2**20
START = 100 * MB
POLICY = gw.Uniform(gw.Identity(), schedule=gw.Pipelined(), edge_bytes=START)
TRIALS, GRID, SEEDS = 10, 12, 10
WITHIN = 1.05
"""Largest factor over the best of the grid."""
SAME = 1.02
"""Times within so much of each other are no difference on a shared machine."""


class Steps(NamedTuple):
    """Numbers of rounds and steps."""

    rounds: int
    counted: int
    """Steps in each turn of the grid, after one that does not count."""
    trial: int
    """Steps in each trial of a search."""
    discarded: int


USUAL = Steps(rounds=3, counted=3, trial=10, discarded=2)
SLOW = Steps(rounds=3, counted=1, trial=4, discarded=1)
"""The numbers over 100 Mb/s, where a step takes one or two seconds."""
BESIDE = 9
"""Counted steps of each size in the comparison with the choice: three do not separate 5 % from chance."""


def run(arguments: list[str]) -> int:
    """Measure what is missing, write the table; 1 if a cell is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuning")
    parser.add_argument("--jobs", nargs="+", default=["mlp", "resnet", "transformer"])
    parser.add_argument("--links", nargs="+", default=["100mbit", "500mbit"])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    cells = json.loads(PATH.read_text())["cells"] if PATH.exists() and not options.again else {}
    if problem := emulation_problem():
        print(f"tuning: not measured, {problem}")
        return 0
    for link in options.links:
        for job in options.jobs:
            if f"{job}, {link}" not in cells:
                cells[f"{job}, {link}"] = measured(job, link)
                write(PATH, {"trials": TRIALS, "start_bytes": START, "cells": cells})
    lines = table(cells)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return verdict(cells)


def measured(job: str, link: str) -> dict[str, Any]:
    """One cell."""
    steps = json.dumps(SLOW if link == "100mbit" else USUAL)
    with EmulatedCluster(2, 1, inter=link) as cluster:
        return collected(cluster, "benchmarks.tuning", (job, steps), f"{job}, {link}", timeout=1800.0)


def on_grid(cell: dict[str, Any], nbytes: int) -> float:
    """Milliseconds of a step under a size, from the grid's."""
    sizes = [math.log(point["nbytes"]) for point in cell["grid"]]
    return float(np.interp(math.log(nbytes), sizes, [point["step_ms"] for point in cell["grid"]]))


def random_ms(cell: dict[str, Any]) -> list[float]:
    """The step of the best size that random search found, of each run, from the grid's."""
    return [min(on_grid(cell, nbytes) for nbytes in sizes) for sizes in cell["random"]]


def table(cells: dict[str, Any]) -> list[str]:
    """Markdown: a row for every cell."""
    columns = ["job, link", "start", "chosen", "grid's best", "chosen / best", "trials", "random's median / best", "cost"]
    rows = []
    for name, cell in cells.items():
        beside, least = cell["beside_ms"], min(point["step_ms"] for point in cell["grid"])
        row = [
            name,
            f"{beside['start']:.0f} ms",
            f"{cell['chosen_bytes'] / MB:.1f} MB, {cell['chosen_buckets']} buckets, {beside['chosen']:.0f} ms",
            f"{cell['best_bytes'] / MB:.1f} MB, {beside['best']:.0f} ms",
            f"{beside['chosen'] / beside['best']:.3f}",
            str(len(cell["trials"])),
            f"{statistics.median(random_ms(cell)) / least:.3f}",
            f"{cell['cost_s']:.1f} s",
        ]
        rows.append(row)
    return markdown.table(columns, rows)


def verdict(cells: dict[str, Any]) -> int:
    """1, and a line for each, if cells are not as they should be."""
    wrong = []
    for name, cell in cells.items():
        beside, random = cell["beside_ms"], statistics.median(random_ms(cell))
        chosen = on_grid(cell, cell["chosen_bytes"])
        if beside["chosen"] > WITHIN * beside["best"]:
            wrong.append(f"{name}: {beside['chosen']:.0f} ms, and {beside['best']:.0f} with the best of the grid")
        if chosen > SAME * random:
            wrong.append(f"{name}: on the grid {chosen:.0f} ms, and {random:.0f} by random search's median")
    print("\n".join(wrong))
    return 1 if wrong else 0


# ---- on the ranks


class Training:
    """A job in training."""

    def __init__(self, job: Job, ranks: Ranks, plan: Any) -> None:
        self.job, self.ranks, self.step = job, ranks, 0
        self.model = job.make_model(0)
        self.optimizer = job.make_optimizer(self.model)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan)

    def steps(self, count: int) -> list[float]:
        """Milliseconds from the end of each backward to the end of the next: one fewer than steps."""
        ends = []
        for _ in range(count):
            batch = self.job.batch(self.ranks.rank, self.ranks.world_size, self.step)
            self.job.loss(self.model, batch).backward()
            ends.append(time.perf_counter())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return [1e3 * (after - before) for before, after in pairwise(ends)]

    def group(self, nbytes: int) -> tuple[tuple[str, ...], ...]:
        """The buckets that a size makes."""
        plan = Live(self.handle.session).plan_of(_with(nbytes))
        return tuple(bucket.tensors for bucket in plan.buckets)

    def turns(self, sizes: list[int], steps: Steps) -> list[float]:
        """Milliseconds of a step under each size, on the slowest rank: medians over turns, which are interleaved."""
        live, found = Live(self.handle.session), [list[float]() for _ in sizes]
        for turn in range(steps.rounds):
            for place in [(turn + each) % len(sizes) for each in range(len(sizes))]:
                live.change_to(live.plan_of(_with(sizes[place])))
                found[place] += self.steps(1 + steps.counted)
        everybody = self.ranks.gather([statistics.median(times) for times in found])
        return [max(column) for column in zip(*everybody, strict=True)]


def _with(nbytes: int) -> gw.Policy:
    return gw.Tuned(POLICY).with_bytes(nbytes)


def _grid(training: Training) -> Iterator[int]:
    """The middle size of each grouping, of 12 at most."""
    search = SizeSearch(gw.Tuned(POLICY, search="grid"), training.group)
    alike: dict[Any, list[int]] = {}
    for nbytes, grouping in search.groupings.items():
        alike.setdefault(grouping, []).append(nbytes)
    all_of_them = [sizes[len(sizes) // 2] for sizes in alike.values()]
    count = min(GRID, len(all_of_them))
    for place in range(count):
        yield all_of_them[round(place * (len(all_of_them) - 1) / max(1, count - 1))]


def _drawn(training: Training, trials: int, seed: int) -> list[int]:
    """The sizes that random search tries."""
    tuned = gw.Tuned(POLICY, search="random", trials=trials, seed=seed, start_bytes=START)
    search, sizes = SizeSearch(tuned, training.group), list[int]()
    while (nbytes := search.propose()) is not None:
        sizes.append(nbytes)
        search.took(1.0)
    return sizes


def _rank(name: str, steps: Steps) -> None:
    torch.set_num_threads(1)
    ranks, job = Ranks(300.0, communicating=True), make_job(name)
    training = Training(job, ranks, _with(START))
    training.steps(3)
    sizes = list(_grid(training))
    grid_ms = training.turns(sizes, steps)
    tuned = gw.Tuned(POLICY, trials=TRIALS, start_bytes=START, trial_steps=steps.trial, discard_steps=steps.discarded)
    tuning = Training(job, ranks, tuned)
    while tuning.handle.decision is None:
        tuning.steps(1)
    decision = tuning.handle.decision
    tuning.handle.detach()
    chosen, best = decision.chosen.nbytes, sizes[grid_ms.index(min(grid_ms))]
    if training.group(chosen) == training.group(best):
        best = chosen
    compared = list(dict.fromkeys([chosen, best, START]))
    beside_ms = dict(zip(compared, training.turns(compared, steps._replace(rounds=BESIDE // steps.counted)), strict=True))
    found = {
        "grid": [
            {"nbytes": nbytes, "buckets": len(training.group(nbytes)), "step_ms": step_ms}
            for nbytes, step_ms in zip(sizes, grid_ms, strict=True)
        ],
        "trials": [
            {"nbytes": tried.nbytes, "step_ms": tried.step_us / 1e3, "cost_s": tried.cost_us / 1e6} for tried in decision.tried
        ],
        "cost_s": decision.cost_us / 1e6,
        "chosen_bytes": chosen,
        "chosen_buckets": decision.chosen.buckets,
        "best_bytes": best,
        "beside_ms": {"chosen": beside_ms[chosen], "best": beside_ms[best], "start": beside_ms[START]},
        "random": [_drawn(training, len(decision.tried), seed) for seed in range(SEEDS)],
        "steps": steps._asdict(),
    }
    ranks.meet()
    training.handle.detach()
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)
    ranks.close()


if __name__ == "__main__":
    _rank(sys.argv[1], Steps(*json.loads(sys.argv[2])))
