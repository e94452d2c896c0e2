"""Frameworks with gradwire over a slow link: how much of what is possible each reaches.

    python -m benchmarks frameworks [--cells CELL ..] [--link LINK] [--rounds N] [--again] [--out FOLDER]

A GPT-2 of 7.5 million parameters trains on 2 nodes, in the cells auto-transformer-LINK the bench's transformer. All methods of a
cell train in turns, in one run (`benchmarks.framework_arms`). *Possible* is the step without communication: the share is that
step over gradwire's, which equals DDP's step over gradwire's as a part of DDP's step over the one without communication. HSDP
has 2 ranks on each node.

A cell is written to CELL.json in benchmarks/results/frameworks, or in --out, when it ends. Only cells without a file are
measured, unless --again.
Needs network namespaces. Returns 1 if a cell misses its goal.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, collected, write
from benchmarks.framework_arms import CELLS, ROUNDED
from benchmarks.markdown import table
from gradwire.bench.names import UNLIMITED
from gradwire.bench.runner import emulation_problem
from gradwire.bench.statistics import median_ratio
from gradwire.testbed import EmulatedCluster

FOLDER = RESULTS / "frameworks"
SHARE, HOOK_SHARE, AUTO_SHARE, AUTO_SPEEDUP, HSDP_BYTES, HSDP_SPEEDUP, FSDP2_SPEEDUP = 0.8, 0.9, 0.95, 0.98, 0.14, 2.5, 2.5
COLUMNS = ("cell", "method", "step ms (95 %)", "times as fast as its rival", "of what is possible (95 %)", "MB of a node")
RIVALS = {"hsdp": "native", "fsdp2": "native"}


def run(arguments: list[str]) -> int:
    """Measure what is missing, print all cells asked for; 1 if one misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks frameworks")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--link", help="default: the cell's own, such as 200mbit; or unlimited")
    parser.add_argument("--rounds", type=int, help="of turns of 3 steps; default: the cell's own")
    parser.add_argument("--again", action="store_true", help="measure cells that have results, too")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the cells' results")
    options = parser.parse_args(arguments)
    problem, missed = emulation_problem(), []
    rows: list[tuple[str, ...]] = []
    for cell in options.cells:
        path = options.out / f"{cell}.json"
        if options.again or not path.exists():
            if problem:
                print(f"{cell}: not measured, {problem}")
                continue
            began, link = time.monotonic(), options.link or CELLS[cell].link
            with EmulatedCluster(2, 2 if cell == "hsdp" else 1, inter=None if link == UNLIMITED else link) as cluster:
                module, words = "benchmarks.framework_arms", (cell, options.rounds or CELLS[cell].rounds)
                found = collected(cluster, module, words, cell, timeout=3600.0, hears=is_of_the_trainer)
            write(path, {"link": link, "seconds": round(time.monotonic() - began)} | found)
        found = json.loads(path.read_text())
        rows += rows_of(found)
        missed += missed_by(found)
    print("\n".join(table(COLUMNS, rows, left=2)))
    print("\n".join(missed))
    return int(bool(missed))


def is_of_the_trainer(line: str) -> bool:
    """Whether the line is the summary that the Trainer prints, a dict of Python."""
    return line.startswith("{'")


def rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each method of a cell."""
    cell, steps = found["cell"], found["step_us"]
    rival = steps[RIVALS.get(cell, "ddp")]
    rows: list[tuple[str, ...]] = []
    for method, us in steps.items():
        own, faster, share = median_ratio(us, [1e3]), median_ratio(rival, us), median_ratio(steps["floor"], us)
        rows.append(
            (
                cell,
                method,
                f"{own.ratio:.0f} ({own.low:.0f} to {own.high:.0f})",
                f"{faster.ratio:.2f}",
                f"{share.ratio:.2f} ({share.low:.2f} to {share.high:.2f})",
                f"{found['sent'][method] / 1e6:.2f}",
            )
        )
    return rows


def missed_by(found: dict[str, Any]) -> list[str]:
    """Return the goals that the cell misses, in words."""
    cell, steps, sent = found["cell"], found["step_us"], found["sent"]

    def ratio(over: str, method: str) -> float:
        return median_ratio(steps[over], steps[method]).ratio

    if cell == "hook":
        reached = {
            f"the hook over parallelize is {ratio('parallelize', 'hook'):.2f}, wanted {HOOK_SHARE}": ratio("parallelize", "hook")
            >= HOOK_SHARE
        }
    elif cell.startswith("auto-"):
        share, speedup = ratio("auto", "auto hook"), ratio("ddp", "auto hook")
        reached = {f"the hook's auto over DDP is {speedup:.3f}, wanted {AUTO_SPEEDUP}": speedup >= AUTO_SPEEDUP}
        if found["link"] == "200mbit":
            reached[f"the hook's auto over parallelize's is {share:.3f}, wanted {AUTO_SHARE}"] = share >= AUTO_SHARE
    elif cell == "fsdp2":
        best = min(("4 bits", "2 bits"), key=lambda way: ratio(way, "native"))
        reached = {
            f"{ROUNDED}, is {ratio('native', ROUNDED):.2f} times as fast as native FSDP2, wanted {FSDP2_SPEEDUP}": ratio(
                "native", ROUNDED
            )
            >= FSDP2_SPEEDUP,
            f"the best spec by hand, {best}, over auto is {ratio(best, 'auto'):.2f}, wanted 0.95": ratio(best, "auto") >= 0.95,
        }
    elif cell == "hsdp":
        # a node sends as much as its gradients, between two nodes: half in each phase
        share = sent["gradwire"] / sent["native"]
        reached = {
            f"bytes between nodes are {share:.3f} of native HSDP's, wanted {HSDP_BYTES}": share <= HSDP_BYTES,
            f"steps are {ratio('native', 'gradwire'):.2f} times as fast as native HSDP's, wanted {HSDP_SPEEDUP}": ratio(
                "native", "gradwire"
            )
            >= HSDP_SPEEDUP,
        }
    else:
        reached = {f"{ratio('floor', 'gradwire'):.2f} of what is possible, wanted {SHARE}": ratio("floor", "gradwire") >= SHARE}
    return [f"{cell}: {words}" for words, good in reached.items() if not good]
