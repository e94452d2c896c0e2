"""Races auto, from its first step on, for equal seconds against DDP and all that auto chooses from, on a GPT-2 of
transformers.

    python -m benchmarks first [--links 100mbit ..] [--nodes 2 4] [--seconds 60] [--again]

The model has 7.4 M parameters and trains on random tokens. In each cell DDP, DDP with 2 MB buckets, `plan="auto"` and every spec
that auto may choose train for equal seconds, in turns, all from their first step. The columns are those of docs/matrix.md
(`python -m benchmarks matrix --measure`). *Of its plan* is auto's number of steps over the seconds times the rate of
the plan that auto chose, measured after the decision. Needs network namespaces.

Each cell is written to benchmarks/results/first.json at once, and is not measured again while it stands there (--again does).
Returns 1 if a decision came late, if auto was behind by more than 2 %, or if its choice is more than 3 % slower than the best.
"""

import argparse
import json
import sys
from itertools import product
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.campaigns.matrix_cells import CANDIDATES, RIVALS
from benchmarks.campaigns.matrix_cells import SAFE as AUTO
from benchmarks.campaigns.matrix_first import COLUMNS, FirstSteps, first_steps, missed
from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from gradwire.bench.names import GivenModel
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import Cell
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench

PATH = RESULTS / "first.json"
LINKS, NODES = ("100mbit", "500mbit", "1000mbit", "unlimited"), (2, 4)
GPT2 = GivenModel(
    model="transformers:GPT2LMHeadModel", config="n_layer=6,n_embd=320,n_head=5,vocab_size=128,n_positions=64", input="4x64"
)


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    parser.add_argument("--nodes", nargs="+", type=int, choices=NODES, default=NODES)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--again", action="store_true", help="measure what is already known, too")
    options = parser.parse_args(arguments)
    if problem := emulation_problem():
        print(f"first: not measured, {problem}")
        return 0
    known: dict[str, Any] = json.loads(PATH.read_text()).get("cells", {}) if PATH.exists() else {}
    for nodes, link in product(options.nodes, options.links):
        name = f"{nodes} nodes, {link}"
        if (options.again or name not in known) and (cells := measured(link, nodes, options.seconds)) is not None:
            known[name] = _kept(cells)
            write(PATH, {"cells": known})
    found = {name: msgspec.convert(cell["first"], FirstSteps) for name, cell in sorted(known.items())}
    columns = ("cell", *COLUMNS, "steps", "times DDP's", "of its plan")
    rows = [(name, *cell.row, *(f"{known[name][key]:{form}}" for key, form in EXTRAS.items())) for name, cell in found.items()]
    print("\n".join(table(columns, rows)))
    problems = list(missed(found))
    print("\n".join(problems))
    return int(bool(problems))


def measured(link: str, nodes: int, seconds: float) -> dict[str, Cell] | None:
    """Return the cells by method. Return None, and print the reason, if a method failed."""
    request = BenchRequest(
        jobs=["gpt2"], links=[link], methods=[*RIVALS, AUTO, *CANDIDATES], model=GPT2, nodes=nodes, race_s=seconds, alone_steps=0
    )
    found = run_bench(request, None, ProgressView(Console(stderr=True)))
    for failure in found.failures:
        print(failure, file=sys.stderr)
    return None if found.failures else {cell.method: cell for cell in found.cells}


EXTRAS = {"steps": "d", "times_ddp": ".2f", "of_plan": ".3f"}
"""Columns of a race besides `FirstSteps`, and their formats."""


def _kept(cells: dict[str, Cell]) -> dict[str, Any]:
    auto = cells[AUTO]
    seconds, steps = sum(auto.step_us) / 1e6, len(auto.step_us)
    ddp_rate = max(len(cells[name].step_us) / (sum(cells[name].step_us) / 1e6) for name in RIVALS)
    decided_us = float(np.mean(auto.step_us[auto.counted[0] :]))
    first = first_steps(auto, [cells[name] for name in RIVALS], [cells[name] for name in CANDIDATES])
    return {
        "first": msgspec.to_builtins(first),
        "steps": steps,
        "times_ddp": steps / seconds / ddp_rate,
        "of_plan": steps * decided_us / (seconds * 1e6),
    }
