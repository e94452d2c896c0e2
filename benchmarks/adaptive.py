"""Compares adaptive bits with uniform 4 bits and auto over slow links, in turns in one run: steps, and losses at equal steps.

    python -m benchmarks adaptive [--job transformer] [--links 100mbit 200mbit] [--seeds 0 1 2] [--steps 30]

Takes about 6 minutes. Needs network namespaces. For each link and seed `gradwire bench` trains on 2 nodes with uniform 4 bits,
`AdaptiveBits` for the fewest bytes and for the shortest step, and `plan="auto"`. Those that decide do so first, each in one turn
of its own; then all take turns of 5 steps. A ratio pairs the turns of one round: the median over all rounds and seeds, with a
95 % interval. Losses are means over the last 10 of equally many steps, against those of uniform 4 bits with the same seed and
batches: the mean over seeds, with a 95 % interval. So few steps show only large differences; `python -m benchmarks bits` trains
longer.

Writes benchmarks/results/adaptive.json. 1 if a method failed, or if the better AdaptiveBits at the slowest link is not at least
1.15 times as fast as uniform 4 bits at a loss that is not certainly higher.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console

from benchmarks.campaigns.matrix_cells import paired_ratio
from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from benchmarks.paired import interval
from gradwire.bench.names import GRADWIRE_PREFIX, MOST_DECIDING_STEPS
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
from gradwire.record.run import Interval

PATH = RESULTS / "adaptive.json"
UNIFORM, BY_BYTES, BY_TIME, AUTO = "4 bits", "AdaptiveBits, bytes", "AdaptiveBits, time", "auto"
METHODS = {
    "no communication": "floor",
    UNIFORM: GRADWIRE_PREFIX + '{"default":{"id":"qsgd","bits":4}}',
    BY_BYTES: f"{GRADWIRE_PREFIX}adaptive",
    BY_TIME: f"{GRADWIRE_PREFIX}adaptive-time",
    AUTO: f"{GRADWIRE_PREFIX}auto",
}
"""The methods by their names in tables. 4 bits are the policy that AdaptiveBits begins with: vectors stay uncompressed."""
LAST = 10
"""Steps at the end of which the loss is the mean."""
WANTED = 1.15


class Found(NamedTuple):
    """The results of a method over one link, by seed."""

    turns_us: list[list[float]]
    """The median step of each turn."""
    loss: list[float]
    bytes: int | None
    """Bytes that a rank sends in a step."""
    chosen: list[str]


def run(arguments: list[str]) -> int:
    """Measure, print, write; say what is not as wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adaptive")
    parser.add_argument("--job", default="transformer")
    parser.add_argument("--links", nargs="+", default=["100mbit", "200mbit"], help="the slowest first")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"adaptive: not measured, {problem}")
        return 0
    runs: dict[str, list[BenchRun]] = {link: [] for link in options.links}
    for seed, link in itertools.product(options.seeds, options.links):
        request = BenchRequest(
            jobs=[options.job],
            links=[link],
            methods=list(METHODS.values()),
            steps=options.steps,
            deciding_steps=MOST_DECIDING_STEPS,
            alone_steps=0,
            seed=seed,
        )
        runs[link].append(run_bench(request, None, ProgressView(Console(stderr=True))))
        if failures := runs[link][-1].failures:
            print("\n".join(failures), file=sys.stderr)
            return 1
    found = {link: found_in(of_link) for link, of_link in runs.items()}
    print("\n".join(lines_of(found)))
    facts = {"job": options.job, "seeds": options.seeds, "steps": options.steps, "nodes": 2}
    kept = {link: {name: each._asdict() for name, each in methods.items()} for link, methods in found.items()}
    write(PATH, facts | {"links": kept})
    wrong = verdict(found)
    print("\n".join(wrong))
    return int(bool(wrong))


def found_in(runs: Sequence[BenchRun]) -> dict[str, Found]:
    """Return the results of each method, from one run for each seed."""
    found = {}
    for name, method in METHODS.items():
        cells = [next(cell for cell in each.cells if cell.method == method) for each in runs]
        equal = [min(len(cell.loss) for cell in each.cells) for each in runs]
        found[name] = Found(
            turns_us=[turns_of(cell, each.turn_steps) for cell, each in zip(cells, runs, strict=True)],
            loss=[statistics.fmean(cell.loss[max(0, steps - LAST) : steps]) for cell, steps in zip(cells, equal, strict=True)],
            bytes=cells[0].planned_bytes,
            chosen=[cell.decided[-1].chosen for cell in cells if cell.decided],
        )
    return found


def turns_of(cell: Cell, turn_steps: int) -> list[float]:
    """The median step of each turn that counts, in microseconds."""
    times = cell.step_us[slice(*cell.counted)]
    return [statistics.median(times[first : first + turn_steps]) for first in range(0, len(times), turn_steps)]


def ratio_to_uniform(found: Mapping[str, Found], name: str) -> Interval:
    """Return how many times faster than uniform 4 bits a method is, over pairs of turns."""
    uniform, own = (list(itertools.chain(*found[each].turns_us)) for each in (UNIFORM, name))
    return paired_ratio(uniform, own)


def loss_against_uniform(found: Mapping[str, Found], name: str) -> tuple[float, float]:
    """The mean over seeds of what the loss is higher than with uniform 4 bits, as a part of it, and half its 95 % interval."""
    return interval([own / uniform - 1 for own, uniform in zip(found[name].loss, found[UNIFORM].loss, strict=True)])


def lines_of(found: Mapping[str, Mapping[str, Found]]) -> list[str]:
    """Markdown: a row for each link and method, and what auto chose."""
    rows = []
    for link, methods in found.items():
        for name, each in methods.items():
            step_ms = statistics.median(itertools.chain(*each.turns_us)) / 1e3
            times = ratio_to_uniform(methods, name)
            loss, around = loss_against_uniform(methods, name)
            sent = "" if each.bytes is None else f"{each.bytes / 1e6:.2f}"
            trains = METHODS[name].startswith(GRADWIRE_PREFIX)  # ranks without communication train apart
            rows.append(
                (
                    link,
                    name,
                    f"{step_ms:.1f}",
                    f"{times.ratio:.2f} ({times.low:.2f} to {times.high:.2f})",
                    sent,
                    f"{loss:+.2%} ± {around:.2%}" if trains else "",
                )
            )
    columns = ("link", "method", "step, ms", "times as fast as 4 bits", "MB a step", "loss against 4 bits")
    chosen = [f"{link}: auto chose {', '.join(dict.fromkeys(methods[AUTO].chosen))}." for link, methods in found.items()]
    return [*table(columns, rows), "", *chosen]


def verdict(found: Mapping[str, Mapping[str, Found]]) -> list[str]:
    """Return the missed goals at the slowest link."""
    link, methods = next(iter(found.items()))
    best = max((BY_BYTES, BY_TIME), key=lambda name: ratio_to_uniform(methods, name).ratio)
    times, (loss, around) = ratio_to_uniform(methods, best).ratio, loss_against_uniform(methods, best)
    wrong = []
    if times < WANTED:
        wrong.append(f"{link}: {best} is {times:.2f} times as fast as uniform 4 bits; {WANTED} was wanted")
    if loss - around > 0:
        wrong.append(f"{link}: the loss of {best} is {loss:.2%} ± {around:.2%} higher than that of uniform 4 bits")
    return wrong
