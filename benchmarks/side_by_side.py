"""The papers' systems beside gradwire's joint plan and their predictions: docs/side_by_side.md.

    python -m benchmarks side_by_side [--results DIR]                                       # write the page, measure nothing
    python -m benchmarks side_by_side --measure [--jobs mlp] [--links 500mbit] [--nodes 2 --ranks-per-node 2] ...
    python -m benchmarks side_by_side --measure --compressors dgc,onebit ...    # cells in which all systems have this compressor
    python -m benchmarks side_by_side --measure --compressors identity ...      # cells of DeAR and its baselines, uncompressed

With --measure the cells that have no result are measured and printed, and no page is written. DIR is benchmarks/results/papers.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.campaigns.papers_cells import PapersCell, median_block_us, papers_table, papers_verdict
from benchmarks.campaigns.papers_plans import BASELINES, PAPERS_SPECS, SHARED_SPECS
from benchmarks.campaigns.papers_run import LINKS, SHAPES, PapersRequest, run_papers
from benchmarks.common import RESULTS, print_wide
from benchmarks.markdown import table
from gradwire.bench.names import parse_spec, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem
from gradwire.bench.table import NOTHING
from gradwire.core.files import write_whole

__all__ = ["run", "side_by_side_page"]

PAGE = Path(__file__).parents[1] / "docs" / "side_by_side.md"


class Claim(NamedTuple):
    """The largest speedup over another system that a paper claims for its system."""

    system: str
    over: str
    times: float
    where: str
    """Place in the paper."""


CLAIMS = (
    Claim("Cupcake", "DDP", 2.03, "abstract: BERT-base, 8 x 8 GPUs, 25 Gb/s"),
    Claim("Cupcake", "GRACE", 2.30, "section 5.1: ResNet50"),
    Claim("Cupcake", "HiPress", 1.79, "section 5.1: ResNet50, 8 x 8 GPUs, 25 Gb/s"),
    Claim("ByteComp", "DDP", 3.69, "section 5.2.3: VGG16, PCIe; over BytePS without compression"),
    Claim("ByteComp", "HiPress", 1.77, "section 5.2.3: LSTM, PCIe"),
)
HEAD = """# The papers' systems side by side

Written by `python -m benchmarks side_by_side`; do not edit. [How it is measured](bench.md#the-papers-systems) has the command of
each kind of cell. gradwire's engine runs each system as a plan of the same job, in turns, over links with a limited rate. With
`--compressors {words}` all systems of a cell have one compressor, or none; {compressed}.

The cells were measured on {dates}. The machine had {cores} processors for {ranks} ranks. So ranks share processors, and
predictions know that ([how](simulator.md#what-is-modelled)). AdamW is fused, since otherwise its time depends on how many
elements have got a gradient so far.

## What the papers claim

A paper's number is its best case, on its own machines. The measured number is the best of the cells below; the last column is the
median of all cells.

"""
CELLS = """
## All cells

The time of a step is the median over turns, with its 95 % interval. The error is the prediction's, from a profile that was made
before the run. The last columns say how many times faster a system is than DDP, GRACE and HiPress.

While the cells of 2026-11-28 were measured, the speed of the rented machine changed by a third within minutes ([what was
seen](experiments/measuring.md#noise)). Their errors and intervals have that in them. So some cells were measured in several runs,
each with a profile and plans of its own. All runs count: the turns of all, and the mean of their predictions.
"""
WANTED = """
## What is wanted

"""


def run(arguments: list[str]) -> int:
    """Measure, or write the page. Returns 1 if a system failed, or if there is nothing to write from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks side_by_side")
    parser.add_argument("--results", type=Path, default=RESULTS / "papers", help="folder of the cells' results")
    parser.add_argument("--measure", action="store_true", help="measure and print, write no page; the rest is for this")
    parser.add_argument("--jobs", type=split_names, default=["transformer", "mlp", "resnet"], help="comma-separated")
    parser.add_argument("--links", type=split_names, default=LINKS, help=f"default: {','.join(LINKS)}")
    parser.add_argument("--nodes", type=int, help="default: 4 nodes of 1 rank, and 2 nodes of 2 ranks")
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--intra", help="rate inside each node, which all its ranks share, as behind a PCIe switch")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each system")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each system before those")
    parser.add_argument("--turn", type=int, default=5, help="steps that a system takes in one turn")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models and batches")
    parser.add_argument("--spec", action="append", help=f"of systems that choose; may be repeated; default: {SHARED_SPECS}")
    parser.add_argument(
        "--compressors",
        type=split_names,
        default=[""],
        help=f"of {','.join(PAPERS_SPECS)}: the papers' compressors, or none. Each makes a cell of its own, with this one spec",
    )
    parser.add_argument("--again", action="store_true", help="measure existing cells once more, and pool the runs")
    options = parser.parse_args(arguments)
    return measure(options) if options.measure else write_page(options.results)


def measure(options: argparse.Namespace) -> int:
    """Measure the cells that are missing. Print all that were asked for, and the bounds."""
    one_shape = options.nodes is not None or options.ranks_per_node is not None
    request = PapersRequest(
        folder=options.results,
        specs=[parse_spec(each) for each in options.spec or SHARED_SPECS],
        jobs=options.jobs,
        links=options.links,
        shapes=[(options.nodes or 2, options.ranks_per_node or 1)] if one_shape else SHAPES,
        intra=options.intra,
        compressors=options.compressors,
        steps=options.steps,
        warmup_steps=options.warmup,
        turn_steps=options.turn,
        seed=options.seed,
        again=options.again,
    )
    say = partial(print, file=sys.stderr)
    cells = run_papers(request, emulation_problem(), ProgressView(Console(stderr=True)), say)
    print_wide(map(papers_table, cells))
    print("\n".join(papers_verdict(cells)))
    failures = [failure for cell in cells for failure in cell.failures]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def write_page(folder: Path) -> int:
    """Write the page. Returns 1 if there is nothing to write from."""
    cells = [PapersCell.load(path) for path in sorted(folder.glob("*.json"))]
    if not cells:
        print(f"{folder} has no cell: `python -m benchmarks side_by_side --measure --results {folder}` measures them.")
        return 1
    write_whole(PAGE, side_by_side_page(cells))
    print(f"written to {PAGE}")
    return 0


def side_by_side_page(cells: Sequence[PapersCell]) -> str:
    """The page."""
    ranks = " or ".join(sorted({str(cell.nodes * cell.ranks_per_node) for cell in cells}))
    cores = " or ".join(sorted({str(cell.cores) for cell in cells}))
    dates = ", ".join(sorted({cell.made.date[:10] for cell in cells}))
    columns = ("", "the paper, at most", "where", "measured, at most", "in", "median of all")
    lines = table(columns, [_claimed(claim, cells) for claim in CLAIMS])
    own = sum(bool(cell.compressor) for cell in cells)
    compressed = f"cells of this kind below: {own}" if own else "none is measured yet"
    words = ",".join(PAPERS_SPECS)
    text = HEAD.format(dates=dates, cores=cores, ranks=ranks, words=words, compressed=compressed)
    text += "\n".join(lines) + "\n" + CELLS
    for cell in cells:
        columns = ("", "predicted ms", "measured ms", "95 %", "error", *(f"over {name}" for name in BASELINES))
        runs = f", {cell.runs} runs" if cell.runs > 1 else ""
        text += f"\n### {cell.name}{runs}\n\n" + "\n".join(table(columns, _rows(cell), left=1)) + "\n"
    return text + WANTED + "\n".join(f"- {line}" for line in papers_verdict(cells)) + "\n"


def _claimed(claim: Claim, cells: Sequence[PapersCell]) -> list[str]:
    found = {cell.name: over.ratio for cell in cells if (over := cell.speedup(claim.system, claim.over)) is not None}
    said = [f"{claim.system} over {claim.over}", f"{claim.times:.2f}", claim.where]
    if not found:
        return [*said, NOTHING, NOTHING, NOTHING]
    best = max(found, key=lambda name: found[name])
    return [*said, f"{found[best]:.2f}", best, f"{statistics.median(found.values()):.2f}"]


def _rows(cell: PapersCell) -> Iterator[list[str]]:
    for row in cell.rows:
        if row.error is None:
            yield [row.system, f"{row.predicted_us / 1e3:.0f}", "failed", *[NOTHING] * (2 + len(BASELINES))]
            continue
        step = median_block_us(row)
        overs = (cell.speedup(row.system, baseline) for baseline in BASELINES)
        yield [
            row.system,
            f"{row.predicted_us / 1e3:.0f}",
            f"{step.ratio / 1e3:.0f}",
            f"{step.low / 1e3:.0f} to {step.high / 1e3:.0f}",
            f"{100 * row.error:+.0f} %",
            *(NOTHING if over is None else f"{over.ratio:.2f}" for over in overs),
        ]
