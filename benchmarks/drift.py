"""Counts the steps that auto needs to answer a link that becomes slower in mid-run, and faster again.

    python -m benchmarks drift [--jobs transformer] [--fast 1000mbit] [--slow 100mbit] [--runs 3] [--busy]

Two emulated nodes, `plan="auto"` with all its defaults. When it has decided and run on for a while the link between the nodes
changes, and later it changes back. Counted are steps from the change until the next decision runs, trials and all. Two minutes.
`--busy` leaves the link at 500 Mb/s for 500 steps, while a process burns both cores for 2 seconds at random moments, and counts
new decisions. Needs network namespaces. What is measured goes to benchmarks/results/drift.json and busy.json. 1 if an answer took
more than 10 steps, or 20 on the way back, or if there was a decision for nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

import gradwire as gw
from benchmarks.common import RESULTS, collected, write
from gradwire.bench.jobs import make_job
from gradwire.bench.ranks import Ranks
from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster

PATH = RESULTS / "drift.json"
SETTLED_STEPS = 40
"""Steps from a decision to the next change of the link."""
MOST_STEPS = 200
"""Steps in which an answer must come."""
WITHIN_STEPS = (10, 20)
"""Wanted number of steps for the answer to a slower link, and for the way back."""
BUSY_LINK, BUSY_STEPS = "500mbit", 500
BURN = """
import random, subprocess, sys, time
chance = random.Random(0)
while True:
    time.sleep(chance.uniform(2, 10))
    until = "import time\\nend = time.monotonic() + 2\\nwhile time.monotonic() < end: pass"
    for burner in [subprocess.Popen([sys.executable, "-c", until]) for _ in range(2)]:
        burner.wait()
"""
"""A program that burns two cores for 2 seconds at random moments, until it is ended."""
CHANGE = "change the link to "


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if an answer came late, or never."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks drift")
    parser.add_argument("--jobs", nargs="+", default=["transformer"])
    parser.add_argument("--fast", default="1000mbit")
    parser.add_argument("--slow", default="100mbit")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"drift: not measured, {problem}")
        return 0
    if options.busy:
        return _busy(options.jobs)
    runs = [measured(job, options.fast, options.slow) for job in options.jobs for _ in range(options.runs)]
    write(PATH, {"within_steps": WITHIN_STEPS, "runs": runs})
    for each in runs:
        for answer in each["answers"]:
            print(f"{each['job']}, {answer['link']}: {answer['steps']} steps; {answer['said']}")
    taken = [[answer["steps"] or MOST_STEPS for answer in each["answers"]] for each in runs]
    return int(any(steps > within for each in taken for steps, within in zip(each, WITHIN_STEPS, strict=True)))


def _busy(jobs: list[str]) -> int:
    """Count decisions on a busy machine. Returns 1 if there was one besides the first."""
    runs = []
    for job in jobs:
        with EmulatedCluster(2, 1, inter=BUSY_LINK) as cluster:
            runs.append(collected(cluster, "benchmarks.drift", (job,), job, timeout=600.0))
    write(RESULTS / "busy.json", {"link": BUSY_LINK, "steps": BUSY_STEPS, "runs": runs})
    for each in runs:
        print(f"{each['job']}: {len(each['decisions'])} decisions in {each['steps']} steps, {each['seconds']:.0f} s")
        print("\n".join(f"  {said}" for said in each["decisions"]))
    return int(any(len(each["decisions"]) > 1 for each in runs))


def measured(job: str, fast: str, slow: str) -> dict[str, Any]:
    """One training."""
    with EmulatedCluster(2, 1, inter=fast) as cluster:

        def changes(line: str) -> bool:
            if change := line.startswith(CHANGE):
                cluster.set_inter(line.removeprefix(CHANGE))
            return change

        return collected(cluster, "benchmarks.drift", (job, slow, fast), job, timeout=600.0, hears=changes)


def _rank(name: str, links: list[str]) -> None:
    torch.set_num_threads(1)
    ranks, job = Ranks(300.0, communicating=True), make_job(name)
    model = job.make_model(0)
    optimizer = job.make_optimizer(model)
    handle = gw.parallelize(model, optimizer)
    step = 0

    def decisions() -> list[gw.AutoDecision]:
        """Those that changed something, or answered a change. A second look may end with the plan of before."""
        return [each for each in handle.decisions if each.second_look is None or each.second_look.swapped]

    def train(steps: int, until_decisions: int | None = None) -> int | None:
        """So many steps; fewer if there are so many decisions before. How many steps that took, None if they did not come."""
        nonlocal step
        for taken in range(steps):
            if until_decisions is not None and len(decisions()) >= until_decisions:
                return taken
            job.loss(model, job.batch(ranks.rank, ranks.world_size, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        return None

    train(MOST_STEPS, until_decisions=1)
    if not links:
        burner = subprocess.Popen([sys.executable, "-c", BURN]) if ranks.rank == 0 else None
        began = time.monotonic()
        try:
            train(BUSY_STEPS)
        finally:
            if burner is not None:
                burner.terminate()
        told = {"steps": BUSY_STEPS, "seconds": time.monotonic() - began, "decisions": [str(d) for d in decisions()]}
        if ranks.rank == 0:
            print(json.dumps({"job": name} | told), flush=True)
    answers = []
    for link in links:
        train(SETTLED_STEPS)
        before = len(decisions())
        if ranks.rank == 0:
            print(CHANGE + link, flush=True)
        steps = train(MOST_STEPS, until_decisions=before + 1)
        answers.append({"link": link, "steps": steps, "said": str(handle.decision)})
    if links and ranks.rank == 0:
        print(json.dumps({"job": name, "answers": answers}), flush=True)
    handle.detach()
    ranks.close()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2:])
