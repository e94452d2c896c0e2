"""Judges auto from its first step: when it decided, its time since the start against DDP's, and its choice against the
best one.

Pure: no torch, no clock.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gradwire.auto.trial import BUDGET_PLAIN_STEPS, LEAST_BUDGET_US, MOST_STEPS
from gradwire.bench.results import Cell
from gradwire.bench.statistics import RESAMPLES
from gradwire.record.run import Interval

__all__ = [
    "COLUMNS", "FIRST_STEP", "JUDGED_STEPS", "MOST_BEHIND", "MOST_OVER_BEST", "FirstSteps", "first_steps", "missed",
]  # fmt: skip

FIRST_STEP, JUDGED_STEPS = 20, 300
"""Auto's time since the start counts from this step, up to that one."""
MOST_BEHIND, MOST_OVER_BEST = 1.02, 1.03
COLUMNS = ("DDP, ms", "decided in", "seconds", "behind at 20", "at worst", "steps over DDP's", "over the best", "runs")


class FirstSteps(NamedTuple):
    """One cell. Ratios have 95 % intervals from resampled steps of DDP."""

    plain_us: float
    """The median step of the better DDP."""
    decided_step: int | None
    """The step of the first decision; None: there was none."""
    decided_us: float
    """The time of all steps until then."""
    budget_us: float
    """The most that a decision may take."""
    at_first: Interval
    """*Behind* at `FIRST_STEP`: the time of auto's first n steps over that of n median steps of the better DDP."""
    worst: Interval
    """*Behind* at the worst n between `FIRST_STEP` and `JUDGED_STEPS`."""
    gain: float
    """The better DDP's median step over that of auto after its decision."""
    over_best: float
    """The median step of auto's choice over that of the fastest method, in the rounds in which all of them take turns."""
    chosen: str
    """The plan in words, of the last decision; '' if there was none."""

    @property
    def late(self) -> bool:
        """Whether the decision took more steps, or more time, than it may."""
        return self.decided_step is None or self.decided_step > MOST_STEPS or self.decided_us > self.budget_us

    @property
    def row(self) -> tuple[str, ...]:
        """The values under `COLUMNS`."""
        decided = "-" if self.decided_step is None else f"{self.decided_step} of {MOST_STEPS} steps"
        return (
            f"{self.plain_us / 1e3:.0f}",
            decided,
            "-" if self.decided_step is None else f"{self.decided_us / 1e6:.1f} of {self.budget_us / 1e6:.1f}",
            f"{self.at_first.ratio:.2f}",
            f"{self.worst.ratio:.3f} ({self.worst.low:.3f}-{self.worst.high:.3f})",
            f"{self.gain:.2f}",
            f"{self.over_best:.3f}",
            self.chosen or "-",
        )


def first_steps(auto: Cell, rivals: Sequence[Cell], candidates: Sequence[Cell]) -> FirstSteps:
    """Compare auto with the better one of the rivals, and its choice with rivals and candidates, all of one run."""
    times = {cell.method: _times(cell) for cell in rivals}
    plain = min(times.values(), key=lambda each: float(np.median(each)))
    plain_us, ends = float(np.median(plain)), list(accumulate(auto.step_us))
    drawn = np.random.default_rng(0).integers(len(plain), size=(RESAMPLES, len(plain)))
    low_us, high_us = np.percentile(np.median(plain[drawn], axis=1), [2.5, 97.5])

    def behind(steps: int) -> Interval:
        mean_us = ends[steps - 1] / steps
        return Interval(ratio=mean_us / plain_us, low=mean_us / float(high_us), high=mean_us / float(low_us))

    first = auto.decided[0] if auto.decided else None
    auto_us = float(np.median(_times(auto)))
    counts = range(min(FIRST_STEP, len(ends)), min(JUDGED_STEPS, len(ends)) + 1)
    return FirstSteps(
        plain_us=plain_us,
        decided_step=None if first is None else first.step,
        decided_us=0.0 if first is None else ends[first.step - 1],
        budget_us=max(LEAST_BUDGET_US, BUDGET_PLAIN_STEPS * plain_us),
        at_first=behind(counts[0]),
        worst=max(map(behind, counts), key=lambda each: each.ratio),
        gain=plain_us / auto_us,
        over_best=_in_turns_us(auto) / min(_in_turns_us(cell) for cell in (*rivals, *candidates)),
        chosen=auto.decided[-1].chosen if auto.decided else "",
    )


def missed(found: Mapping[str, FirstSteps]) -> Iterator[str]:
    """A line for each cell, by name, in which auto decided late, was behind, or chose a plan that is not the best."""
    for name, cell in found.items():
        if cell.late:
            yield f"{name}: decided late"
        if cell.worst.low > MOST_BEHIND:
            yield f"{name}: behind DDP by {cell.worst.ratio:.3f} ({cell.worst.low:.3f} to {cell.worst.high:.3f})"
        if cell.over_best > MOST_OVER_BEST:
            yield f"{name}: the choice takes {cell.over_best:.3f} times as long as the best"


def _in_turns_us(cell: Cell) -> float:
    return float(np.median(cell.step_us[slice(*cell.counted)]))


def _times(cell: Cell) -> np.ndarray:
    """All steps from the first measured one on."""
    return np.asarray(cell.step_us[cell.counted[0] :])
