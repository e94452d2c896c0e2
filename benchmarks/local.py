"""Local steps beside per-step compression: held-out loss against seconds of training, on slow links.

    python -m benchmarks local [--links 10mbit 20mbit 100mbit] [--nodes 2] [--seconds 300] [--only WORD ...] [--again]

All methods of a link train the bench's transformer for equal seconds, in turns, in one run (`race_s` of the bench). The goal is
the loss that plan="auto" has at its end. A link's results go to benchmarks/results/local/LINK-NODES.json when it ends, and are
not measured again while they stand there, unless --again. Methods that failed are told and left out. Needs network namespaces.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from gradwire.bench.jobs import make_job
from gradwire.bench.progress import RaceView
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench

JOB = "transformer"
FOLDER = RESULTS / "local"
AUTO = "auto, accuracy safe"
TWO_BITS: dict[str, Any] = {"id": "qsgd", "bits": 2}
PLAIN = {"lr": 1.0, "momentum": 0.0}


def _local(spec: Mapping[str, Any], **schedule: Any) -> str:
    return "gradwire:" + json.dumps({"default": spec, "schedule": {"kind": "local", "every": 30} | schedule})


METHODS = {
    AUTO: "gradwire:auto",
    "local, float32": _local({"id": "identity"}),
    "local, 4 bits": _local({"id": "qsgd", "bits": 4}),
    "local, 2 bits with feedback": _local({"id": "error_feedback", "inner": TWO_BITS}),
    "local, 4 bits, mean of weights": _local({"id": "qsgd", "bits": 4}, outer=PLAIN),
    "streaming, 4 bits": _local({"id": "qsgd", "bits": 4}, fragments=4, delay=5, mixing=0.5, outer={"lr": 0.4}),
    "SparseLoCo": _local(
        {"id": "error_feedback", "decay": 0.95, "inner": {"id": "topk", "ratio": 0.02, "values": TWO_BITS}}, outer=PLAIN
    ),
}
COLUMNS = ("", "steps", "samples", "ms a step", "last loss", "seconds to auto's last loss", "times sooner")


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write the tables; 1 where no link can be emulated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks local")
    parser.add_argument("--links", nargs="+", default=["10mbit", "20mbit", "100mbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, for each method")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="words: methods with one of them in their names, and auto"
    )
    parser.add_argument("--again", action="store_true", help="measure links that have results, too")
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    chosen = [name for name in METHODS if name == AUTO or any(word in name for word in options.only)]
    for link in options.links:
        path = FOLDER / f"{link}-{options.nodes}.json"
        if options.again or not path.exists():
            result = measured(chosen, link, options.nodes, options.seconds)
            if AUTO not in result["methods"]:
                raise SystemExit(f"{link}: auto failed, and its last loss is the goal of the others")
            write(path, result)
    lines = [line for path in sorted(FOLDER.glob("*.json")) for line in table_of(json.loads(path.read_text()))]
    print("\n".join(lines))
    return 0


def measured(chosen: list[str], link: str, nodes: int, seconds: float) -> dict[str, Any]:
    """What each method reached, by its name in METHODS: pairs of seconds and held-out loss, and the time of its steps."""
    methods = [METHODS[name] for name in chosen]
    request = BenchRequest([JOB], [link], methods, nodes=nodes, race_s=seconds, alone_steps=0)
    done = run_bench(request, None, RaceView(Console(stderr=True), make_job(JOB).batch_size * nodes))
    print("\n".join(done.failures), file=sys.stderr)
    cells, found = {cell.method: cell for cell in done.cells if cell.failure is None}, {}
    for name in chosen:
        if (cell := cells.get(METHODS[name])) is None:
            continue
        ends = [0.0, *accumulate(us / 1e6 for us in cell.step_us)]
        found[name] = {
            "steps": len(cell.step_us),
            "samples": len(cell.step_us) * make_job(JOB).batch_size * nodes,
            "step_ms": 1e3 * ends[-1] / len(cell.step_us),
            "held_out": [(ends[steps], loss) for steps, loss in cell.held_out],
        }
    return {"link": link, "nodes": nodes, "seconds": seconds, "methods": found}


def table_of(result: Mapping[str, Any]) -> list[str]:
    """A heading and a table."""
    methods = result["methods"]
    goal = methods[AUTO]["held_out"][-1][1]
    whole = reached(methods[AUTO]["held_out"], goal)
    rows = []
    for name, found in methods.items():
        seconds = reached(found["held_out"], goal)
        sooner = ("never", "-") if seconds is None or whole is None else (f"{seconds:.1f}", f"{whole / seconds:.2f}")
        rows.append((name, str(found["steps"]), f"{found['samples']:,}", f"{found['step_ms']:.0f}",
                     f"{found['held_out'][-1][1]:.3f}", *sooner))  # fmt: skip
    head = f"{result['link']}, {result['nodes']} nodes, {result['seconds']:g} s of training for each method:"
    return ["", head, "", *table(COLUMNS, rows, left=1), ""]


def reached(held_out: list[tuple[float, float]], goal: float) -> float | None:
    """Seconds of training after which the loss was at most the goal, on the line between two evaluations; None: it never was.

    >>> reached([(0.0, 4.0), (10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    last: tuple[float, float] | None = None
    for seconds, loss in held_out:
        if loss <= goal:
            if last is None:
                return seconds
            return last[0] + (seconds - last[0]) * (last[1] - goal) / (last[1] - loss)
        last = seconds, loss
    return None
