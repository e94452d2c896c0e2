"""Measures a step of local steps over a slow link, against a step that sends nothing and against the prediction.

    python -m benchmarks local --step [--links 10mbit] [--nodes 2] [--turns 3] [--again]

The transformer is profiled over the link, and each method predicted from that. Then a step without communication and the methods
take turns of 62 steps in one run. Steps are means over whole periods: of a turn the first step, which waits for nothing, and the
last, which waits for all, are left out. Writes benchmarks/results/local-step.json after each link, and a table into
docs/local_steps.md. A link that has results is not measured again, unless --again. Needs network namespaces and a quiet machine;
takes two minutes a link.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import gradwire as gw
from benchmarks.campaigns.predict import plan_of, profiled
from benchmarks.common import RESULTS, mean_inside_turns, write, write_between
from benchmarks.markdown import table
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
from gradwire.sim.timeline import simulate

PATH = RESULTS / "local-step.json"
PAGE = Path(__file__).parent.parent / "docs" / "local_steps.md"
BEGIN, END = "<!-- step: made by `python -m benchmarks local --step` -->", "<!-- end of step -->"
JOB, FLOOR = "transformer", "floor"
PERIOD = 60
"""Steps of a turn that count: two periods of 30."""
TURN = PERIOD + 2
WARMUP_STEPS = 5
PROFILE_STEPS = 20


def run(arguments: list[str], methods: Mapping[str, str]) -> int:
    """Measure what is missing of these methods, and print the table; 1 where no link can be emulated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks local --step")
    parser.add_argument("--links", nargs="+", default=["10mbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure links that have results, too")
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    links = known.setdefault("links", {})
    for link in options.links:
        name = f"{link}, {options.nodes} nodes"
        if options.again or name not in links:
            links[name] = _measured(link, options.nodes, options.turns, methods)
            write(PATH, {"links": links})
    lines = step_table(known)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return 0


def _measured(link: str, nodes: int, turns: int, methods: Mapping[str, str]) -> dict[str, Any]:
    """Return the measured and the predicted mean step of each method, in milliseconds; for the floor, the measured one."""
    asked = BenchRequest(
        [JOB],
        [link],
        [FLOOR, *methods.values()],
        nodes=nodes,
        steps=TURN * turns,
        turn_steps=TURN,
        warmup_steps=WARMUP_STEPS,
        alone_steps=0,
    )
    watch = ProgressView(Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder:
        found = profiled(asked, JOB, link, [gw.QSGD(bits=4)], PROFILE_STEPS, Path(folder), watch)
        predicted = {
            method: simulate(plan_of(method, found), found.profile, found.cluster, found.costs).step_us
            for method in methods.values()
        }
        bench = run_bench(asked, None, watch)
    steps = {}
    for name, method in {FLOOR: FLOOR, **methods}.items():
        cell = bench.cell(JOB, link, method)
        if cell is None or cell.failure is not None:
            raise SystemExit(f"{link}, {name} failed: {cell.failure if cell else 'it was not measured'}")
        steps[name] = {"measured_ms": mean_inside_turns(cell.step_us[WARMUP_STEPS:], PERIOD) / 1e3}
        if method in predicted:
            steps[name]["predicted_ms"] = predicted[method] / 1e3
    return steps


def step_table(result: Mapping[str, Any]) -> list[str]:
    """Markdown: of what stands in the results, a row for every link and method."""
    rows = []
    for link, steps in result.get("links", {}).items():
        floor = steps[FLOOR]["measured_ms"]
        for name, step in steps.items():
            measured, predicted = step["measured_ms"], step.get("predicted_ms")
            said = ("-", "-") if predicted is None else (f"{predicted:.0f}", f"{predicted / measured:.2f}")
            shown = "no communication" if name == FLOOR else name
            rows.append((link, shown, f"{measured:.0f}", f"{measured / floor:.2f}", *said))
    head = ("link", "", "mean step, ms", "over no communication", "predicted, ms", "predicted over measured")
    return table(head, rows, left=2)
