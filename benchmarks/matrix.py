"""Auto's three accuracy classes beside DDP and torch's hooks: docs/matrix.md.

    python -m benchmarks matrix [--loss-steps 150]                                          # write the page, measure nothing
    python -m benchmarks matrix --measure [--jobs mlp] [--links 100mbit] [--nodes 2] ...    # measure, print, write no page

With --measure the cells that have no result are measured: step times, and times to DDP's loss. An estimate of the duration is
printed first. A cell is a file in benchmarks/results/matrix, or in the folder of --out.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.campaigns.matrix import JOBS, LINKS, NODES, MatrixRequest, measured_cells, run_matrix
from benchmarks.campaigns.matrix_checks import verdict_lines
from benchmarks.campaigns.matrix_tables import matrix_page, terminal_tables
from benchmarks.common import RESULTS, print_wide
from gradwire.bench.names import split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem
from gradwire.core.files import write_whole

PAGE = Path(__file__).parent.parent / "docs" / "matrix.md"


def run(arguments: list[str]) -> int:
    """Measure, or write the page. Returns 1 if a method failed, or if there is nothing to write from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks matrix")
    parser.add_argument("--loss-steps", type=int, default=150, help="the target is DDP's loss after so many steps")
    parser.add_argument("--measure", action="store_true", help="measure and print, write no page; the rest is for this")
    parser.add_argument("--jobs", type=split_names, default=JOBS, help=f"default: {','.join(JOBS)}")
    parser.add_argument("--links", type=split_names, default=LINKS, help=f"default: {','.join(LINKS)}")
    parser.add_argument("--nodes", type=int, help="default: 2 and 4")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models and batches")
    parser.add_argument("--out", type=Path, default=RESULTS / "matrix", help="folder for the cells' results")
    parser.add_argument("--again", action="store_true", help="measure existing cells again")
    options = parser.parse_args(arguments)
    request = MatrixRequest(
        folder=options.out,
        jobs=options.jobs,
        links=options.links,
        nodes=NODES if options.nodes is None else (options.nodes,),
        loss_steps=options.loss_steps,
        seed=options.seed,
        again=options.again,
    )
    return measure(request) if options.measure else write_page(options.loss_steps)


def measure(request: MatrixRequest) -> int:
    """Measure the cells that are missing. Print all that were asked for, and what they show."""
    say = partial(print, file=sys.stderr)
    cells, failures = run_matrix(request, emulation_problem(), ProgressView(Console(stderr=True)), say)
    print_wide(terminal_tables(cells))
    print("\n".join([f"Ranks share {os.cpu_count()} cores.", *verdict_lines(cells)]))
    for failure in failures:
        print(f"FAILED, and its cell is not kept: {failure}", file=sys.stderr)
    return 1 if failures else 0


def write_page(loss_steps: int) -> int:
    """Write docs/matrix.md. Returns 1 if there is nothing to write from."""
    cells = measured_cells(MatrixRequest(RESULTS / "matrix", loss_steps=loss_steps))
    if not cells:
        print(f"nothing is measured yet: python -m benchmarks matrix --measure --loss-steps {loss_steps}")
        return 1
    write_whole(PAGE, matrix_page(cells))
    print(f"written to {PAGE}")
    print("\n".join(verdict_lines(cells)))
    return 0
