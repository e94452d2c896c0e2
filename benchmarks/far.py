"""Steps between two sites by their distance: DDP, the schedules, and plan="auto".

    python -m benchmarks far [--delays 0 10 25 50 100] [--nodes 8] [--rate 100] [--steps 20] [--again]

Two sites share out the nodes. The rate is that of a site, in Mb/s. Computation is a timed sleep, so many nodes fit on few
processors. All methods of a delay run in turns. Results go to benchmarks/results/far/NODES-RATE-DELAY.json after each delay; what
is there is not measured again, unless --again. The tables go to docs/far_links.md. Needs network namespaces.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from benchmarks.sleeping_cells import (
    add_options,
    failures,
    found_by,
    is_there,
    milliseconds,
    predicted_ms,
    ratio,
    request_of,
    results_in,
    status_of,
)
from gradwire.bench.names import UNLIMITED
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem, run_bench
from gradwire.bench.statistics import wire_us
from gradwire.core.files import write_whole

FOLDER = RESULTS / "far"
PAGE = Path(__file__).parents[1] / "docs" / "far_links.md"
JOB, SITES = "transformer", 2
TURN_STEPS = 5
"""Steps of a turn: a disturbance of some seconds falls on several methods. The first step of a pipelined turn has no gathers
before it, so a turn has several."""
METHODS = {
    "no communication": "floor",
    "DDP": "ddp",
    "4 bits": "gradwire:qsgd4",
    "4 bits, pipelined": "gradwire:qsgd4@pipelined",
    "4 bits, delayed": "gradwire:"
    + json.dumps({"default": {"id": "qsgd", "bits": 4}, "schedule": {"kind": "delayed", "k": None, "local_lr": 0}}),
    "auto": "gradwire:auto",
    "auto, all schedules": "gradwire:auto@all",
}
BASE, HIDING = "4 bits", ("4 bits, pipelined", "4 bits, delayed")
TEXT = """# Steps over far links

How long a step takes between two sites, by their distance. The bench's transformer has 6.09 million parameters. With 4 bits
3.2 MB leave each site in a step. With DDP at least 24.4 MB do.

{tables}

- **Emulated**, and measured by `python -m benchmarks far`. Computation is a timed sleep. Median steps of rank means, in ms.
- A delay is a round trip. A rate is that of one site, in each direction, and its machines share it.
- **4 bits** is `gw.QSGD(bits=4)` with the schedule [`backward`](schedules.md). **delayed** makes no corrections.
- **possible** is the largest of three, for the plan of **auto**. All computation, and then the last gradient's way: half a round
  trip for each phase of its exchange, and one for the ranks' reports. Forward, the bytes between sites at the site's rate, and
  half a round trip for the last ones and for reports. The processor time of all ranks and of the relay, over the machine's
  processors. **of possible** is that over auto's step. "-": the row lacks what this needs.
- **predicted** is auto's own prediction over its step. **predicted, all** is the same with all schedules.
- **hiding** says how many times shorter the better one of pipelined and delayed is than 4 bits alone.
- **auto** uses `backward`, as by default. With all schedules it may use `pipelined` too. It cannot take `delayed` here:
  `delayed` works with torch's own optimizers only, and this job has another one. Specs with
  [element weights](glossary.md) begin with 20 steps of 4 bits. The measured steps come later, except in rows with \\*, which
  are older. What it chose:

{chosen}

How to train between sites: [Train between two sites](how-to/sites.md). Losses against seconds:
[methods beside each other](sites_measured.md).
"""


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write the page; 1 where nothing can be emulated, and where a method failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks far")
    parser.add_argument("--delays", nargs="+", type=int, default=[0, 10, 25, 50, 100], help="round trips, in ms")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rate", type=int, default=100, help="of a site, in Mb/s")
    add_options(parser, 20, f"measured steps of each method, {TURN_STEPS} in a turn")
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    failed: list[str] = []
    for delay in options.delays:
        path = FOLDER / f"{options.nodes}-{options.rate}-{delay}.json"
        if not options.again and is_there(path, METHODS):
            continue
        wan = f"{delay}ms rate {options.rate}mbit"
        methods = list(METHODS.values())
        request = request_of(JOB, UNLIMITED, methods, options.nodes, options.steps, TURN_STEPS, SITES, wan)
        done = run_bench(request, None, ProgressView(Console(stderr=True)))
        found = {name: found_by(done.cell(JOB, UNLIMITED, method)) for name, method in METHODS.items()}
        failed += failures(path.stem, found)
        processors = len(os.sched_getaffinity(0))
        about = {
            "nodes": options.nodes,
            "mbps": options.rate,
            "delay_ms": delay,
            "steps": options.steps,
            "processors": processors,
        }
        between = None if done.between_sites is None else msgspec.structs.asdict(done.between_sites)
        write(path, about | {"between_sites": between, "methods": found}, quiet=True)
        for note in done.notes:
            print(note, file=sys.stderr)
    results = sorted(results_in(FOLDER), key=lambda each: (each["mbps"], each["nodes"], each["delay_ms"]))
    tables, chosen = tables_of(results), chosen_of(results)
    print("\n".join([*tables, "", *chosen]))
    write_whole(PAGE, TEXT.format(tables="\n".join(tables), chosen="\n".join(chosen)))
    return status_of(failed)


def tables_of(results: list[dict[str, Any]]) -> list[str]:
    """A table for each rate and number of nodes: the median steps by delay."""
    lines: list[str] = []
    for mbps, nodes in sorted({(each["mbps"], each["nodes"]) for each in results}):
        rows = []
        for result in results:
            if (result["mbps"], result["nodes"]) == (mbps, nodes):
                times = (milliseconds(result["methods"][name]["step_ms"]) for name in METHODS)
                more = (*of_auto(result), ratio(*hiding(result)))
                rows.append([f"{result['delay_ms']} ms{old_mark(result)}", *times, *more])
        columns = ("delay", *METHODS, "possible", "of possible", "predicted", "predicted, all", "hiding")
        lines += ["", f"{SITES} sites, {nodes} machines, {mbps} Mb/s:", "", *table(columns, rows, left=1)]
    return lines


def of_auto(result: Mapping[str, Any]) -> list[str]:
    """What could be reached with auto's plan, how near auto came, and its predictions over its steps."""
    auto, every, bound = result["methods"]["auto"], result["methods"]["auto, all schedules"], possible_ms(result)
    return [
        "-" if bound is None else milliseconds(bound),
        ratio(bound, auto["step_ms"]),
        *(ratio(predicted_ms(each), each["step_ms"]) for each in (auto, every)),
    ]


def possible_ms(result: Mapping[str, Any]) -> float | None:
    """The least time of a step with the plan that auto chose; None for results that lack a part of it."""
    auto, alone, between = result["methods"]["auto"], result["methods"]["no communication"], result.get("between_sites") or {}
    needed = (alone["step_ms"], auto.get("crossing_mb"), auto.get("phases"), between.get("wire_bytes"), result.get("processors"))
    if None in needed:
        return None
    half_ms, crossing_bytes = result["delay_ms"] / 2, 1e6 * auto["crossing_mb"]
    wire_ms = wire_us(crossing_bytes / SITES, result["mbps"] / 1e3) / 1e3
    relay_ms = 1e3 * between["cpu_s"] * crossing_bytes / max(1, between["wire_bytes"])
    return float(
        max(
            alone["step_ms"] + (auto["phases"] + 1) * half_ms,
            alone["forward_ms"] + wire_ms + 2 * half_ms,
            (result["nodes"] * auto["cpu_ms"] + relay_ms) / result["processors"],
        )
    )


def old_mark(result: Mapping[str, Any]) -> str:
    """What marks a row whose measured steps are among those in which codecs warm up."""
    return "" if "cpu_ms" in result["methods"][BASE] else " \\*"


def hiding(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The step of 4 bits, and the shorter one of the schedules that hide exchanges."""
    base, *hidden = (result["methods"][name]["step_ms"] for name in (BASE, *HIDING))
    return base, None if None in hidden else min(hidden)


def chosen_of(results: list[dict[str, Any]]) -> list[str]:
    """A table of what auto decided last, and after how many steps."""
    rows = []
    for result in results:
        for name, found in result["methods"].items():
            if found["decided"]:
                last = found["decided"][-1]
                place = result["nodes"], f"{result['mbps']} Mb/s", f"{result['delay_ms']} ms"
                rows.append((*place, name, last["chosen"], last["step"]))
    return table(("machines", "rate", "delay", "", "chosen", "after steps"), rows, left=5)
