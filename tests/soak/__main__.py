"""`make soak`: 2,000 faults, in pairs of a kind of fault and a schedule, and 100,000 steps of auto.

The summary goes to benchmarks/results/soak.json.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worlds import CONTEXT

from gradwire.core.files import write_whole
from gradwire.testbed import exit_on_termination
from soak import elastic, integrations, links, saved_sets
from soak.endurance import Endurance, endure
from soak.settings import HOOK, INTEGRATIONS, SCHEDULES, chance_of
from soak.stage import Ranks
from soak.summary import summarise, told
from soak.trials import KINDS, LEFT_OUT, Trial, run

LEAST = 20
"""Trials of each pair of a kind and a schedule, if there are enough."""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "soak.json"


def main(arguments: list[str]) -> int:
    """Run all that is asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("--faults", type=int, default=2000, help="trials")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the long run; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on")
    parser.add_argument("--jobs", type=int, default=4, help="trials at a time: many wait most of the time")
    parser.add_argument("--only", default="", help="kinds, with commas between, of all trials")
    parser.add_argument("--schedules", default="", help="schedules, with commas between, of all trials")
    parser.add_argument("--setting", default="", help="what stands beside the schedule in all trials")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the summary goes")
    options = parser.parse_args(arguments)
    # torch tells of every connection that a dead rank breaks, and steps that are void are warnings
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    os.environ["MALLOC_ARENA_MAX"] = "1"  # memory that is free at the end of a thread's own heap is never given back, up to 8 MB
    cases = chosen(options)
    # a rank is forked in milliseconds from a server that has loaded what ranks and this module need
    frameworks = integrations.PRELOADED if any(schedule in INTEGRATIONS for _, schedule, _ in cases) else []
    CONTEXT.set_forkserver_preload(
        [
            "torch",
            "torch._dynamo",
            "gradwire.api",
            "soak.elastic",
            "soak.links",
            "soak.saved_sets",
            "soak.endurance",
            *frameworks,
        ]
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as folder:
        os.environ |= {"GRADWIRE_CACHE_DIR": folder, "GRADWIRE_FLIGHT_DIR": folder}
        trials = run_trials(options, cases, began)
        runs: list[Endurance] = [endure(options.steps)] if options.steps else []
    left = [str(process) for process in multiprocessing.active_children()] + links.namespaces_left()
    skipped = [] if links.possible() else [*links.OF_LINKS]
    summary = summarise(trials, runs, left, skipped, time.monotonic() - began, options)
    write_whole(options.json, json.dumps(summary, indent=1) + "\n")
    print(told(summary))
    return 0 if summary["passed"] else 1


def run_trials(options: argparse.Namespace, cases: list[tuple[str, str, int]], began: float) -> list[Trial]:
    """All of them, several at a time. Each thread keeps ranks of its own alive."""
    own, everybody = threading.local(), list[Ranks]()

    def one(case: tuple[str, str, int]) -> Trial:
        if not hasattr(own, "ranks"):
            own.ranks = Ranks()
            everybody.append(own.ranks)
        return run(*case, own.ranks, options.setting)

    trials: list[Trial] = []
    pool = ThreadPoolExecutor(options.jobs)
    try:
        for done in [pool.submit(one, case) for case in cases]:
            trials.append(trial := done.result())
            if not trial.passed:
                what = f"{trial.kind}, {trial.schedule}, {trial.setting}, seed {trial.seed}"
                print(f"FAILED {what}: {trial.detail}", flush=True)
            if len(trials) % 50 == 0:
                print(f"{len(trials)} of {len(cases)} trials after {time.monotonic() - began:.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # trials that run come to their own ends
        for ranks in everybody:
            ranks.close()
    return trials


def chosen(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Kind, schedule and seed of each trial: so many of each pair, and what is left goes to the hook's pairs."""
    kinds = [kind for kind in KINDS if kind in options.only.split(",") or not options.only]
    wanted = options.schedules.split(",") if options.schedules else [*SCHEDULES, HOOK, *INTEGRATIONS]
    if not links.possible():
        kinds = [kind for kind in kinds if kind not in links.OF_LINKS]
    pairs = [(kind, schedule) for schedule in wanted for kind in kinds if fits(kind, schedule)]
    main_pairs = [pair for pair in pairs if pair[1] in SCHEDULES]
    of_hook = [pair for pair in pairs if pair[1] not in SCHEDULES]
    cases = [pair for pair in main_pairs for _ in range(LEAST)] if options.faults >= LEAST * len(main_pairs) else []
    turns = of_hook if cases and of_hook else pairs
    chance_of(options.seed, "order").shuffle(turns)
    if options.faults < len(turns):
        turns = every_value_first(turns)
    cases += [turns[number % len(turns)] for number in range(options.faults - len(cases))]
    chance_of(options.seed, "order of trials").shuffle(cases)
    return [(kind, schedule, options.seed + number) for number, (kind, schedule) in enumerate(cases)]


def every_value_first(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same pairs in an order in which the first few have every kind and every schedule."""
    first: list[tuple[str, str]] = []
    seen: set[str] = set()
    for new in (2, 1):
        for pair in pairs:
            if len({*pair} - seen) == new:
                first.append(pair)
                seen |= {*pair}
    return first + [pair for pair in pairs if pair not in first]


def fits(kind: str, schedule: str) -> bool:
    """Whether a kind makes sense under a schedule."""
    return (schedule in INTEGRATIONS) == (kind in integrations.OWN) and (kind, schedule) not in LEFT_OUT


if __name__ == "__main__":
    assert elastic.KINDS is integrations.KINDS is saved_sets.KINDS is KINDS
    with exit_on_termination():
        sys.exit(main(sys.argv[1:]))
