"""Compares a chosen plan with its best rival, once after a decision. Pure: no communication.

A trial runs each plan for two or three steps, and some not at all. Where predictions are wrong, its choice may be too. So the
chosen plan is looked at again, in parts of `PART_STEPS` steps:

1. The chosen plan runs as before. The look ends if no other candidate may be clearly faster. It also ends if the plan takes
   about as long as predicted, unless the trial's budget was spent before the rival's turn. A candidate that ran in the trial
   counts with its time there, others with their predictions. One of the same kind, which differs from the chosen plan in its
   buckets alone, counts as slower by the same factor.
2. The best rival runs. If it is not clearly faster, the chosen plan goes on.
3. The chosen plan runs again. The rival replaces it only if the rival is faster than both of its parts: then a processor that
   was busy for a while, and made the chosen plan slow, changes nothing.

>>> from gradwire.auto.trial import Candidate
>>> trial = Trial([Candidate("A", 90.0), Candidate("B", 96.0, plain=True)])
>>> while (turn := trial.turn) is not None:
...     trial.took((100.0, 120.0)[turn.candidate])
>>> look = SecondLook(trial, trial.chosen, ("4 bits", "plain"), compute_us=80.0)
>>> [look.window([us] * PART_STEPS, [80.0] * PART_STEPS) for us in (130.0, 118.0, 130.0)], look.runs, look.over
([1, 0, 1], 1, True)
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import median
from typing import NamedTuple

from gradwire.auto.changes import WINDOW
from gradwire.auto.trial import Trial

PART_STEPS = 3 * WINDOW
"""Steps of a part."""
SLOWER = 1.10
"""The chosen plan is looked at again from this factor between its time and its prediction on."""
BETTER = 0.95
"""A rival runs only if it may take at most this share of the chosen plan's time, and stays only if it does."""
BUSY = 1.15
"""The processors are busy if both a step and its computation take this many times as long as in the trial and the profile."""


class LookPart(NamedTuple):
    """The steps of one plan in a look."""

    us: float
    """Median time of a step on the slowest rank."""
    exposed_us: float
    """Time that a step waits for exchanges, on the rank that waits least."""


class SecondLook:
    """A second look at the chosen plan of a trial.

    chosen: the index of that plan. kinds: the kind of each candidate. compute_us: the computation time of a step for which the
    plan was chosen.
    """

    def __init__(self, trial: Trial, chosen: int, kinds: Sequence[Hashable], compute_us: float) -> None:
        self.before, self.runs = chosen, chosen
        """The plan that the trial chose, and the plan that runs now: after the end the one that goes on."""
        self.rival: int | None = None
        """The plan that was compared with it; None before it runs."""
        self.parts: defaultdict[int, list[LookPart]] = defaultdict(list)
        """The parts so far, by candidate."""
        self._candidates, self._kinds, self._compute_us = trial.candidates, tuple(kinds), compute_us
        self._trial_us = [trial.median_us(index) for index in range(len(kinds))]
        self._left = frozenset(trial.left)
        self._steps_us: list[float] = []
        self._computes_us: list[float] = []
        self.over = self._trial_us[chosen] is None or len(self._kinds) == 1
        """Whether the look has ended."""

    @property
    def tries(self) -> bool:
        """Whether the rival runs and nothing is decided yet."""
        return self.runs != self.before and not self.over

    @property
    def expected(self) -> bool:
        """Whether the rival ran, or may run: in the trial, the chosen plan was slower than predicted, or others had no turn."""
        return self.rival is not None or bool(self._left) or self._is_slow(self._trial_us[self.before] or 0.0)

    def best(self, index: int) -> LookPart:
        """Return the shortest part of a plan."""
        return min(self.parts[index])

    def window(self, steps_us: Sequence[float], computes_us: Sequence[float], changing: bool = False) -> int | None:
        """Add some steps of the plan that runs, equal on all ranks. Returns the candidate to change to; None if this one goes on.

        steps_us, computes_us: of the slowest rank. changing: whether links, batch or computation seem to have changed; such steps
        do not count.
        """
        if self.over:
            return None
        self._steps_us += steps_us
        self._computes_us += computes_us
        if changing:
            self._steps_us, self._computes_us = [], []
        if len(self._steps_us) < PART_STEPS:
            return None
        us, compute_us = median(self._steps_us), median(self._computes_us)
        self._steps_us, self._computes_us = [], []
        part = LookPart(us, max(0.0, us - compute_us))
        if self.rival is not None:
            self.parts[self.runs].append(part)
            return self._compare()
        if not self._is_busy(us, compute_us):
            self.parts[self.before].append(part)
            self._find_rival(us, compute_us)
        return self.rival

    def leave_out(self, index: int) -> None:
        """This plan cannot run on some rank any more: the other one goes on."""
        self.over = True
        if self.rival is not None:
            self.runs = self.before if index == self.rival else self.rival

    def _is_slow(self, us: float) -> bool:
        return us >= SLOWER * self._candidates[self.before].predicted_us

    def _is_busy(self, us: float, compute_us: float) -> bool:
        """Return whether other programs seem to use the processors. Codecs alone may slow down computation, but did so in the
        trial too."""
        return us > BUSY * (self._trial_us[self.before] or us) and compute_us > BUSY * self._compute_us > 0

    def _find_rival(self, us: float, compute_us: float) -> None:
        """End the first part. The rival runs next, if there is one."""
        likely_us = {
            index: self._likely_us(index, us, compute_us) * each.steps_for_one
            for index, each in enumerate(self._candidates)
            if index != self.before and (index in self._left or self._is_slow(us))
        }
        rival = min(likely_us, key=lambda index: (likely_us[index], index), default=self.before)
        if rival != self.before and likely_us[rival] <= BETTER * self._to_loss_us(self.before):
            self.rival = self.runs = rival
        else:
            self.over = True

    def _likely_us(self, index: int, us: float, compute_us: float) -> float:
        """Return how long a step of another candidate may take, where one of the chosen plan takes `us`."""
        predicted_us, trial_us = self._candidates[index].predicted_us, self._trial_us[index]
        chosen_us, chosen_trial_us = self._candidates[self.before].predicted_us, self._trial_us[self.before]
        assert chosen_trial_us is not None
        if self._kinds[index] == self._kinds[self.before]:
            return predicted_us * us / max(chosen_us, 1e-9) if trial_us is None else trial_us * us / chosen_trial_us
        if trial_us is not None:
            return trial_us
        if index in self._left and compute_us <= BUSY * self._compute_us:
            # what makes the computation a little longer may be the chosen plan
            return max(predicted_us, min(compute_us, self._compute_us))
        # no plan is faster than the computation, which may take longer than it did in the profile
        longer_us = max(0.0, compute_us - self._compute_us) if self._compute_us > 0 else 0.0
        return max(predicted_us + longer_us, compute_us)

    def _compare(self) -> int | None:
        """End a later part. Returns the candidate that runs next, if it is another one."""
        assert self.rival is not None
        faster = self._to_loss_us(self.rival) <= BETTER * self._to_loss_us(self.before)
        if self.runs == self.rival:
            self.runs, self.over = self.before, not faster
            return self.before
        self.over = True
        if not faster:
            return None
        self.runs = self.rival
        return self.rival

    def _to_loss_us(self, index: int) -> float:
        """Return the measured time for the progress of one step of plain all-reduce."""
        return self.best(index).us * self._candidates[index].steps_for_one
