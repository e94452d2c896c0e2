"""One cell of `python -m benchmarks side_by_side`: its file, its rows, and the bounds over all cells. Pure: no torch, no clock.

A cell is one job on one cluster over one link. A turn of a system is a block; the measured time of a system is the median of its
blocks' mean steps. Means, since a step of CD-SGD in five sends everything. Systems are compared block by block, since a machine
may be slower in one turn than in the next.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.campaigns.matrix_cells import paired_ratio
from benchmarks.campaigns.papers_plans import BASELINES, JOINT
from benchmarks.campaigns.predictions import LinkFit
from gradwire.bench.table import NOTHING, milliseconds
from gradwire.core.provenance import Made
from gradwire.core.strict import Document
from gradwire.record.run import Interval

__all__ = ["PapersCell", "SystemRow", "median_block_us", "papers_table", "papers_verdict"]

MEDIAN_ERROR, WORST_ERROR = 0.08, 0.2
PICKED_WITHIN, PICKED_CELLS = 1.05, 0.9
"""The system that is predicted to be fastest takes at most so many times the fastest measured one, in such a share of cells."""


class SystemRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One system: predicted, then measured. If `failure` is set, nothing was measured."""

    system: str
    schedule: str
    buckets: int
    encoded: int
    """Buckets that are compressed."""
    specs: tuple[str, ...]
    """The compressors of these."""
    bytes_per_rank: float
    """Predicted, a step."""
    predicted_us: float
    blocks_us: tuple[float, ...] = ()
    """The mean step of each turn."""
    failure: str | None = None

    @property
    def measured_us(self) -> float | None:
        return None if self.failure is not None else float(np.median(self.blocks_us))

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if (us := self.measured_us) is None else (self.predicted_us - us) / us


class PapersCell(Document, frozen=True, kw_only=True):
    """All systems on one job, one cluster, one link."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("intra", "compressor", "runs")
    what: ClassVar[str] = "cell of the papers' systems"
    remedy: ClassVar[str] = "Measure it with `python -m benchmarks side_by_side --measure --again`."

    version: int = 1
    made: Made
    torch: str
    cores: int
    job: str
    link: str
    nodes: int
    ranks_per_node: int
    intra: str | None = None
    """The rate that the ranks of a node share."""
    compressor: str = ""
    """The word of the one compressor that all systems had, as in `PAPERS_SPECS`; empty: they chose among `specs`."""
    runs: int = 1
    """How often the cell was measured. Each run had a profile and plans of its own."""
    steps: int
    """Measured steps of each system, in all runs."""
    turn_steps: int
    profile_steps: int
    seed: int
    specs: tuple[str, ...]
    """The specs from which systems without a compressor of their own chose."""
    fit: LinkFit
    rows: tuple[SystemRow, ...]

    @property
    def name(self) -> str:
        """The cell's name for a reader."""
        inside = "" if self.intra is None else f", {self.intra} inside nodes"
        compressor = f", {self.specs[0]}" if self.compressor else ""
        return f"{self.job}, {self.nodes} x {self.ranks_per_node} ranks, {self.link}{inside}{compressor}"

    @property
    def measured(self) -> dict[str, SystemRow]:
        """Rows without failure, by system."""
        return {row.system: row for row in self.rows if row.failure is None}

    @property
    def failures(self) -> list[str]:
        return [f"{self.name}, {row.system}: {row.failure}" for row in self.rows if row.failure is not None]

    def pooled(self, earlier: "PapersCell") -> "PapersCell":
        """Return this cell with an earlier run of the same systems: the blocks of both, and the mean of their predictions."""
        before = earlier.measured
        rows = tuple(_pooled(before[row.system], row) for row in self.rows)
        return msgspec.structs.replace(self, runs=self.runs + earlier.runs, steps=self.steps + earlier.steps, rows=rows)

    def speedup(self, system: str, baseline: str) -> Interval | None:
        """Return how many times faster than the baseline a system is, over pairs of blocks; None if one of them failed."""
        rows = self.measured
        if system not in rows or baseline not in rows:
            return None
        return paired_ratio(rows[baseline].blocks_us, rows[system].blocks_us)


def _pooled(earlier: SystemRow, later: SystemRow) -> SystemRow:
    """The later row, with the earlier one's blocks before its own. Each block counts alike in the mean prediction."""
    weights = len(earlier.blocks_us), len(later.blocks_us)
    predicted_us = float(np.average([earlier.predicted_us, later.predicted_us], weights=weights))
    return msgspec.structs.replace(later, predicted_us=predicted_us, blocks_us=earlier.blocks_us + later.blocks_us)


def median_block_us(row: SystemRow) -> Interval:
    """The measured step in microseconds, the median of blocks, with its 95 % percentile bootstrap interval."""
    return paired_ratio(row.blocks_us, [1.0] * len(row.blocks_us))


def papers_table(cell: PapersCell) -> Table:
    """A line for each system."""
    table = Table(title=f"{cell.name}: {cell.steps} steps in turns of {cell.turn_steps}", title_justify="left")
    for column in ("system", "plan"):
        table.add_column(column)
    for column in ("predicted ms", "measured ms", "95 %", "error", *(f"over {name}" for name in BASELINES)):
        table.add_column(column, justify="right")
    for row in cell.rows:
        table.add_row(row.system, _plan_words(row), milliseconds(row.predicted_us), *_measured(cell, row))
    return table


def _plan_words(row: SystemRow) -> str:
    coded = f", {row.encoded} by {' and '.join(row.specs)}" if row.encoded else ""
    return f"{row.buckets} buckets{coded}{'' if row.schedule == 'backward' else f', {row.schedule}'}"


def _measured(cell: PapersCell, row: SystemRow) -> Iterator[str]:
    if row.error is None:
        yield from ("FAILED", *[NOTHING] * (2 + len(BASELINES)))
        return
    step = median_block_us(row)
    yield milliseconds(step.ratio)
    yield f"{milliseconds(step.low)}-{milliseconds(step.high)}"
    yield f"{100 * row.error:+.1f} %"
    for baseline in BASELINES:
        over = cell.speedup(row.system, baseline)
        yield NOTHING if over is None else f"{over.ratio:.2f}x ({over.low:.2f}-{over.high:.2f})"


class _Picked(NamedTuple):
    """A system and the fastest measured system in one cell."""

    cell: str
    system: str
    fastest: str
    over: float
    """The measured step of the system over that of the fastest."""
    within: bool


def papers_verdict(cells: Sequence[PapersCell]) -> list[str]:
    """Return a line for each goal of all cells, with the measured result."""
    cells = [cell for cell in cells if cell.measured]
    if not cells:
        return ["Nothing was measured."]
    errors = [abs(row.error) for cell in cells for row in cell.rows if row.error is not None]
    median, worst = statistics.median(errors), max(errors)
    lines = [
        _line(median <= MEDIAN_ERROR, f"median error at most {MEDIAN_ERROR:.0%}", f"{median:.1%} of {len(errors)} rows"),
        _line(worst <= WORST_ERROR, f"worst error at most {WORST_ERROR:.0%}", f"{worst:.1%}, {_worst_row(cells)}"),
    ]
    picked = [_predicted_fastest(cell) for cell in cells]
    wanted = f"the system predicted fastest is within {PICKED_WITHIN - 1:.0%} of the fastest in {PICKED_CELLS:.0%} of cells"
    lines.append(_share(picked, PICKED_CELLS, wanted))
    joint = [_joint_beside_fastest(cell) for cell in cells if JOINT in cell.measured]
    lines.append(_share(joint, 1.0, f"{JOINT} is the fastest, or within its interval, in every cell"))
    return lines


def _line(holds: bool, wanted: str, found: str) -> str:
    return f"{'yes' if holds else 'NO '}  {wanted}: {found}"


def _share(picked: Sequence[_Picked], least: float, wanted: str) -> str:
    good = sum(each.within for each in picked)
    bad = "; ".join(
        f"{each.cell}: {each.system} takes {each.over:.2f} times as long as {each.fastest}" for each in picked if not each.within
    )
    return _line(good >= least * len(picked) > 0, wanted, f"{good} of {len(picked)}{f' ({bad})' if bad else ''}")


def _worst_row(cells: Sequence[PapersCell]) -> str:
    rows = [(abs(row.error), cell.name, row.system) for cell in cells for row in cell.rows if row.error is not None]
    _, cell_name, system = max(rows)
    return f"{system} in {cell_name}"


def _fastest(cell: PapersCell) -> SystemRow:
    first, *_ = cell.measured.values()
    return min(cell.measured.values(), key=lambda row: paired_ratio(row.blocks_us, first.blocks_us).ratio)


def _beside(cell: PapersCell, row: SystemRow, fastest: SystemRow, within: bool | None = None) -> _Picked:
    over = paired_ratio(row.blocks_us, fastest.blocks_us).ratio
    return _Picked(cell.name, row.system, fastest.system, over, over <= PICKED_WITHIN if within is None else within)


def _predicted_fastest(cell: PapersCell) -> _Picked:
    row = min(cell.measured.values(), key=lambda each: each.predicted_us)
    return _beside(cell, row, _fastest(cell))


def _joint_beside_fastest(cell: PapersCell) -> _Picked:
    """Within: the interval of joint's speed-up over the fastest system reaches 1."""
    row, fastest = cell.measured[JOINT], _fastest(cell)
    return _beside(cell, row, fastest, paired_ratio(fastest.blocks_us, row.blocks_us).high >= 1.0)
