"""Compares codecs on a GPU, on CPUs and on both (ByteComp's second dimension) with their predictions, without a GPU.

    python -m benchmarks offload [--links 400mbit,2gbit] [--nodes 2] [--turns 12]

The GPU is a sleeping accelerator (docs/decisions/042): computation and its codecs are timed sleeps; gradients, sockets and the
codecs on CPUs are real. Each link: a profile is taken, gradwire's planner makes three plans with codecs on the GPU alone, on CPUs
alone, and on both; then the plans take turns. Needs network namespaces; a link takes about half a minute. Writes
benchmarks/results/offload.json and the page offload.md of docs/. 1 if a step is more than 10 % off its prediction, or the plan
with both slower than one of the others by more than what is uncertain.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.campaigns.matrix_cells import paired_ratio
from benchmarks.common import RESULTS, collected, write
from benchmarks.markdown import table
from gradwire.bench.runner import emulation_problem
from gradwire.core.files import write_whole
from gradwire.errors import TestbedError
from gradwire.testbed import EmulatedCluster

PAGE = Path(__file__).parents[1] / "docs" / "offload.md"
WITHIN = 0.10
PLANS = ("gpu", "cpu", "both")
WORKER = "benchmarks.campaigns.offload_worker"
HEAD = """# Codecs on a GPU, on CPUs and on both

Measured by `python -m benchmarks offload` on {date}, {cpu}; do not edit. The GPU is a sleeping accelerator
([decision 42](decisions/042-the-sleeping-accelerator.md)): what it computes and encodes takes fixed times. Gradients, sockets and
codecs on CPUs are real. All plans are of gradwire's planner, from one profile; they differ in the devices that it may use. A step
is the median over turns of 5 steps.

"""


def run(arguments: list[str]) -> int:
    """Measure, write results and page, and say what is not as promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks offload")
    parser.add_argument("--links", default="400mbit,2gbit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        raise TestbedError(f"offload is measured over links of known rates: {problem}. Run as root or allow user namespaces.")
    found: dict[str, Any] = {}
    for link in options.links.split(","):
        with Console(stderr=True).status(link), EmulatedCluster(options.nodes, inter=link) as nodes:
            found[link] = collected(nodes, WORKER, [options.turns], f"offload at {link}", timeout=600)
    write(RESULTS / "offload.json", {"nodes": options.nodes, "links": found})
    result = json.loads((RESULTS / "offload.json").read_text())
    write_whole(PAGE, offload_page(result))
    print(offload_page(result))
    wrong = verdict(found)
    print("\n".join(wrong))
    return 1 if wrong else 0


def offload_page(result: dict[str, Any]) -> str:
    """The page, from results/offload.json."""
    rows = []
    for link, of in result["links"].items():
        for name in PLANS:
            plan = of["plans"][name]
            step_us = float(np.median(plan["turns_us"]))
            rows.append(
                [
                    f"{link}, {name}",
                    f"{plan['on_gpu']} / {plan['on_cpu']} / {plan['plain']}",
                    f"{plan['predicted_us'] / 1e3:.1f}",
                    f"{step_us / 1e3:.1f}",
                    f"{100 * (plan['predicted_us'] / step_us - 1):+.0f} %",
                    f"{float(np.median(of['plans']['both']['turns_us'])) / step_us:.3f}",
                ]
            )
    columns = ["", "buckets: GPU / CPU / uncompressed", "predicted ms", "measured ms", "off by", "both over this"]
    lines = table(columns, rows, left=1)
    return HEAD.format(**result["made"]) + "\n".join([*lines, "", *(verdict(result["links"]) or ["All as promised."])]) + "\n"


def verdict(links: dict[str, Any]) -> list[str]:
    """Return the broken promises, in words."""
    wrong = []
    for link, of in links.items():
        for name, plan in of["plans"].items():
            off = plan["predicted_us"] / float(np.median(plan["turns_us"])) - 1
            if abs(off) > WITHIN:
                wrong.append(f"{link}, {name}: the prediction is off by {100 * off:+.0f} %, allowed are 10 %.")
            if name != "both":
                over = paired_ratio(plan["turns_us"], of["plans"]["both"]["turns_us"])
                if over.high < 1.0:
                    wrong.append(f"{link}: with codecs on both, a step takes {1 / over.ratio:.3f} of that with {name} alone.")
        if of["late"] > 0.02 * of["works"]:
            wrong.append(f"{link}: {of['late']} of {of['works']} works took longer than the accelerator was to sleep.")
    return wrong
