"""One cell of the matrix, and what is read from it: blocks, ratios, seconds to a loss. Pure: no torch, no clock.

A turn of a method is a block. A ratio pairs the blocks of two methods in one round. Which DDP is the better one, the default's
buckets or those of 2 MB, is chosen on rounds of their own, so that the choice does not lend its luck to the comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.campaigns.matrix_first import FirstSteps, first_steps
from gradwire.bench.results import BenchRun, Cell, Decided
from gradwire.bench.statistics import RESAMPLES
from gradwire.record.run import Interval

__all__ = [
    "AGGRESSIVE", "CANDIDATES", "EXACT", "LEARNS_AS_DDP", "METHODS", "POWERSGD", "RIVALS", "SAFE", "WINDOW",
    "MatrixCell", "Reached", "paired_ratio", "smooth",
]  # fmt: skip

EXACT, SAFE, AGGRESSIVE = "gradwire:auto-exact", "gradwire:auto", "gradwire:auto-aggressive"
POWERSGD = "ddp-powersgd"
RIVALS = ("ddp", "ddp-2mb")
CANDIDATES = ("gradwire:identity", "gradwire:qsgd4", "gradwire:qsgd2-ef")
"""The specs that auto "safe" chooses from."""
METHODS = ("floor", "ddp-fp16", "ddp", SAFE, "ddp-2mb", EXACT, "ddp-again", POWERSGD, AGGRESSIVE, *CANDIDATES[1:])
"""The methods in the order of their turns: methods that are compared stand together. `EXACT` stands for the first
candidate."""
LEARNS_AS_DDP = ("ddp", "ddp-again", "ddp-2mb", "ddp-fp16", EXACT)
"""Their losses are DDP's, step by step, but for rounding: `MatrixCell.apart` measures how far that is true."""
CHOOSING_EVERY, FIRST_CHOOSING = 4, 1
"""Rounds 1, 5, 9, .. choose the better DDP, the others compare."""
UNCOMPRESSED = "uncompressed"
"""Beginning of a plan's name if the plan encodes nothing."""
WINDOW = 20
"""Steps that a smoothed loss is the mean of."""


class Reached(NamedTuple):
    """The moment when a method's smoothed loss was at DDP's final value."""

    seconds: float
    """Seconds from the first step on, including the steps before the decision. If the loss was never reached: the
    length of the training."""
    step: int | None
    """Number of these steps; None if the loss was never reached."""
    computed: bool = False
    """Whether some of these steps were not made over this link: they count with the mean of those that were."""


@dataclass(frozen=True)
class MatrixCell:
    """One job on so many nodes over one link."""

    run: BenchRun
    """All methods of `METHODS` in turns."""
    learning: BenchRun
    """DDP's steps without a limit on the link, as many as the time to its loss is asked for: what DDP learns does not depend
    on the link."""

    @property
    def job(self) -> str:
        return self.run.cells[0].job

    @property
    def link(self) -> str:
        return self.run.cells[0].link

    @property
    def gbps(self) -> float | None:
        """None: unlimited."""
        return self.run.cells[0].gbps

    @property
    def name(self) -> str:
        """The cell's name for a reader: job, nodes, link."""
        return f"{self.job}, {self.run.nodes} nodes, {self.link}"

    def method(self, name: str) -> Cell:
        """Return the measurements of a method."""
        found = self.run.cell(self.job, self.link, name)
        assert found is not None, f"cells are saved whole, and {name} is missing"
        return found

    def median_ms(self, name: str) -> float:
        """The median step."""
        step = self.method(name).step
        assert step is not None
        return step.median_us / 1e3

    def blocks(self, name: str) -> list[float]:
        """The median step of each turn, in microseconds."""
        cell = self.method(name)
        times = cell.step_us[slice(*cell.counted)]
        turn = self.run.turn_steps
        return [float(np.median(times[first : first + turn])) for first in range(0, len(times), turn)]

    @property
    def better_ddp(self) -> str:
        """DDP with torch's buckets or with those of 2 MB, whichever was faster in the choosing rounds."""
        return min(RIVALS, key=lambda name: float(np.median(self.blocks(name)[FIRST_CHOOSING::CHOOSING_EVERY])))

    def speedup(self, name: str, baseline: str = "ddp") -> Interval:
        """Return how many times faster than the baseline a method is, over pairs of blocks in the comparing rounds."""
        return paired_ratio(self._comparing(baseline), self._comparing(name))

    @property
    def pairs(self) -> int:
        """Number of pairs of blocks in each ratio."""
        return len(self._comparing("ddp"))

    def of_attainable(self, name: str) -> float | None:
        """The median step over max(compute + codec, wire); None where that is unknown."""
        attainable_us = self.method(name).attainable_us
        return 1e3 * self.median_ms(name) / attainable_us if attainable_us else None

    def chose(self, name: str) -> str:
        """Return the plan that a deciding method ran in the steps that count, in words; '' if it had not decided."""
        decided = self._decided(name)
        return decided.chosen if decided else ""

    def chose_plain(self, name: str) -> bool:
        """Whether that was all-reduce of plain gradients, in these or those buckets."""
        decided = self._decided(name)
        return decided is not None and (decided.plain or decided.chosen.startswith(UNCOMPRESSED))

    def _decided(self, name: str) -> Decided | None:
        """Return the decision in force when the steps that count began. Later decisions, on the way to the loss, are
        not measured."""
        cell = self.method(name)
        return next((each for each in reversed(cell.decided) if each.step <= cell.counted[0]), None)

    @property
    def first_steps(self) -> FirstSteps:
        """Auto "safe" from its first step."""
        candidates = [EXACT, *CANDIDATES[1:]]
        return first_steps(self.method(SAFE), *([self.method(name) for name in names] for names in (RIVALS, candidates)))

    @property
    def target(self) -> float:
        """DDP's final loss: the mean of its last steps."""
        return smooth(self._ddp_learning)[-1]

    def reached(self, name: str) -> Reached:
        """Return the first moment when the method's loss was at the target."""
        cell = self.method(name)
        curve = self._ddp_learning if name in LEARNS_AS_DDP else cell.loss
        step = next((at for at, loss in enumerate(smooth(curve), WINDOW) if loss <= self.target), None)
        made = len(cell.step_us)
        seconds = float(np.sum(cell.step_us[:step])) / 1e6
        missing = max(0, (step or 0) - made)
        if missing:
            seconds += missing * float(np.mean(cell.step_us[slice(*cell.counted)])) / 1e6
        return Reached(seconds, step, computed=missing > 0)

    def held_out(self, name: str) -> float | None:
        """The loss on batches that nobody trains on, at as many steps as DDP's final loss is of, between the evaluations next
        to it; None where they do not reach so far. The number is rank 0's."""
        evaluated = self._ddp.held_out if name in LEARNS_AS_DDP else self.method(name).held_out
        steps, losses = [step for step, _ in evaluated], [loss for _, loss in evaluated]
        wanted = len(self._ddp_learning)
        return float(np.interp(wanted, steps, losses)) if steps and steps[0] <= wanted <= steps[-1] else None

    @property
    def apart(self) -> float:
        """Return the largest distance of the losses of `LEARNS_AS_DDP` from DDP's, as a share of the first step's loss."""
        known = np.asarray(self._ddp_learning)
        largest = 0.0
        for name in LEARNS_AS_DDP:
            own = np.asarray(self.method(name).loss[: len(known)])
            largest = max(largest, float(np.max(np.abs(own - known[: len(own)]))))
        return largest / float(known[0])

    @property
    def _ddp(self) -> Cell:
        return next(cell for cell in self.learning.cells if cell.method == "ddp")

    @property
    def _ddp_learning(self) -> list[float]:
        return self._ddp.loss

    def _comparing(self, name: str) -> list[float]:
        return [us for at, us in enumerate(self.blocks(name)) if at % CHOOSING_EVERY != FIRST_CHOOSING]


def smooth(curve: Sequence[float]) -> list[float]:
    """The mean of each `WINDOW` consecutive losses. Entry i is that of the first `WINDOW` + i steps' last ones.

    >>> smooth([1.0] * 20 + [0.0])
    [1.0, 0.95]
    """
    sums = np.cumsum([0.0, *curve])
    return [float(mean) for mean in (sums[WINDOW:] - sums[:-WINDOW]) / WINDOW]


def paired_ratio(baseline_us: Sequence[float], times_us: Sequence[float], seed: int = 0) -> Interval:
    """Return how many times faster than the baseline, by pairs measured next to each other: the median of their ratios, with a
    95 % percentile bootstrap interval over pairs. A drift of the machine affects both measurements of a pair alike."""
    ratios = np.asarray(baseline_us, dtype=np.float64) / np.asarray(times_us, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return Interval(ratio=float(np.median(ratios)), low=float(low), high=float(high))
