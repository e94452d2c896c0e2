"""How many steps auto needs to answer a link that becomes slower in mid-run, and faster again.

    python -m benchmarks drift [--jobs transformer] [--fast 1000mbit] [--slow 100mbit] [--runs 3]

Two emulated nodes, `plan="auto"` with all its defaults. When it has decided and run on for a while the link between the nodes
changes, and later it changes back. Counted are steps from the change until the next decision runs, trials and all. Four minutes.
Needs network namespaces. What is measured goes to benchmarks/results/drift.json. 1 if an answer took more than 50 steps.
"""

import argparse
import json
import sys
from typing import Any

import torch

import gradwire as gw
from benchmarks.common import RESULTS, collected, write
from gradwire.bench.jobs import make_job
from gradwire.bench.ranks import Ranks
from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster

PATH = RESULTS / "drift.json"
SETTLED_STEPS = 60
"""From a decision to the next change of the link: more than auto keeps still after one."""
MOST_STEPS = 200
"""In which an answer must come."""
WITHIN_STEPS = 50
CHANGE = "change the link to "


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if an answer came late, or never."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks drift")
    parser.add_argument("--jobs", nargs="+", default=["transformer"])
    parser.add_argument("--fast", default="1000mbit")
    parser.add_argument("--slow", default="100mbit")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"drift: not measured, {problem}")
        return 0
    runs = [measured(job, options.fast, options.slow) for job in options.jobs for _ in range(options.runs)]
    write(PATH, {"within_steps": WITHIN_STEPS, "runs": runs})
    answers = [answer for each in runs for answer in each["answers"]]
    for each in runs:
        for answer in each["answers"]:
            print(f"{each['job']}, {answer['link']}: {answer['steps']} steps; {answer['said']}")
    return int(any(answer["steps"] is None or answer["steps"] > WITHIN_STEPS for answer in answers))


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

    def train(steps: int, until_decisions: int | None = None) -> int | None:
        """So many steps; fewer if there are so many decisions before. How many steps that took, None if they did not come."""
        nonlocal step
        for taken in range(steps):
            if until_decisions is not None and len(handle.decisions) >= until_decisions:
                return taken
            job.loss(model, job.batch(ranks.rank, ranks.world_size, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        return None

    train(MOST_STEPS, until_decisions=1)
    answers = []
    for link in links:
        train(SETTLED_STEPS)
        before = len(handle.decisions)
        if ranks.rank == 0:
            print(CHANGE + link, flush=True)
        steps = train(MOST_STEPS, until_decisions=before + 1)
        answers.append({"link": link, "steps": steps, "said": str(handle.decision)})
    if ranks.rank == 0:
        print(json.dumps({"job": name, "answers": answers}), flush=True)
    handle.detach()
    ranks.close()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2:])
