"""docs/side_by_side.md, from what `gradwire bench --papers` measured.

    python -m benchmarks side_by_side [--results DIR]

DIR is benchmarks/results/papers. 1 if there is no cell.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.campaigns.papers_cells import PapersCell, median_block_us, papers_verdict
from benchmarks.campaigns.papers_plans import BASELINES
from benchmarks.common import RESULTS
from benchmarks.markdown import table
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

Measured by `gradwire bench --papers --jobs transformer` and, for the MLP, `gradwire bench --papers --jobs mlp --links 500mbit
--nodes 2 --ranks-per-node 2 --intra 1gbit`; written by `python -m benchmarks side_by_side`; do not edit. The other cells of
`--papers`, the resnet's among them, are not measured. gradwire's engine runs each system as a plan of the same job, in turns,
over links with a limited rate: [how it is measured](bench.md#the-papers-systems). Dates: {dates}. The machine had {cores}
processors for {ranks} ranks. So ranks share processors: what a plan computes beside backward takes longer than on processors of
their own, and predictions do not know that. Nor do they know that AdamW takes longer where most elements got no gradient yet,
as with Top-k: [the cure](how-to/diagnose.md#4-look-for-these-in-the-script) is not used here.

## What the papers claim

A paper's number is its best case, on its own machines. The measured number is the best of the cells below; the last column is the
median of all cells.

"""
CELLS = """
## All cells

The time of a step is the median over turns, with its 95 % interval. The error is the prediction's. The last columns say how many
times faster a system is than DDP, GRACE and HiPress.
"""
WANTED = """
## What is wanted

"""


def run(arguments: list[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks side_by_side")
    parser.add_argument("--results", type=Path, default=RESULTS / "papers")
    folder = parser.parse_args(arguments).results
    cells = [PapersCell.load(path) for path in sorted(folder.glob("*.json"))]
    if not cells:
        print(f"{folder} has no cell: `gradwire bench --papers --out {folder}` measures them.")
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
    text = HEAD.format(dates=dates, cores=cores, ranks=ranks) + "\n".join(lines) + "\n" + CELLS
    for cell in cells:
        columns = ("", "predicted ms", "measured ms", "95 %", "error", *(f"over {name}" for name in BASELINES))
        text += f"\n### {cell.name}\n\n" + "\n".join(table(columns, _rows(cell), left=1)) + "\n"
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
