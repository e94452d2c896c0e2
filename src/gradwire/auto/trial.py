"""Find the plan that is fastest to a loss, by the times of real steps that run the plans in turns. Pure: no communication.

Turns are interleaved, A B C A B C, so that a slower machine affects all plans alike. The first turn of each plan is short. Plans
that are clearly slower are left out; the others go on until the difference is clear or the budget is spent.

>>> trial = Trial([Candidate("A", 90.0), Candidate("plain", 100.0, plain=True)])
>>> while (turn := trial.turn) is not None:
...     trial.took((80.0, 100.0)[turn.candidate])
>>> trial.chosen
0
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

GAIN = 0.02
"""Plain all-reduce is chosen unless another plan is faster by more than this part."""
ALIKE = 0.02
"""Candidates whose times differ by at most this part count as equally fast."""
HYSTERESIS = 0.04
"""The current plan is chosen unless another plan is faster by more than this part."""
_LOOK_STEPS, _TURN_STEPS = 3, 5
"""Steps of first turns and of later ones. The first step of a turn does not count: memory is new."""
_LOOK_FACTOR, _TURN_FACTOR = 1.25, 1.10
"""A candidate is left out if it takes more than so many times as long as the best, after its first turn or a later one."""
_HOPELESS = 4.0
"""A turn ends if a step takes so many times as long as the best. Plain all-reduce does not run if this is predicted."""
_PLAIN_FACTOR = 1.5
"""Plain all-reduce has one turn if it takes so many times as long as the best, and one step if this is predicted."""
_ROUNDS, _MOST_ROUNDS = 2, 6
"""The most rounds with a current plan, whose times have changed so that a quick decision counts, and without one."""
_LEFT = (3, 2, 2)
"""The most candidates after each round."""
_CLEAR = 1.05
"""No further round is needed if the second best takes so many times as long as the best."""


class Candidate(NamedTuple):
    """A plan in a trial."""

    name: str
    predicted_us: float
    plain: bool = False
    """Whether this is plain all-reduce."""
    loss: int = 0
    """The place in the order of accuracy, 0 for the most accurate. Of equally fast candidates the lowest place is chosen."""
    cycle: int = 1
    """Times vary inside groups of so many steps; the mean of each group counts."""
    steps_for_one: float = 1.0
    """Steps needed for the progress of one step of plain all-reduce; times are multiplied by this before they are compared."""


class TrialTurn(NamedTuple):
    """Some steps of one candidate."""

    candidate: int
    steps: int


def allowance_us(best_us: float, plain_us: float) -> float:
    """The budget of a trial: 5 % of 1000 steps of the best plan, or 20 steps of plain all-reduce if these take longer."""
    return max(0.05 * 1000 * best_us, 20 * plain_us)


class Trial:
    """A trial in progress.

    candidates: the best by prediction first. current: the index of the current plan, if there is one. known_us: the time of a
    step under some plan. spent_us, before: the time and the steps spent on deciding before the trial.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        current: int | None = None,
        known_us: float = math.inf,
        spent_us: float = 0.0,
        before: int = 0,
    ) -> None:
        self.candidates, self.current, self._known_us = tuple(candidates), current, known_us
        self.times: list[list[float]] = [[] for _ in self.candidates]
        """Microseconds of the counted steps by candidate, as means over cycles."""
        self.steps, self._total_us = before, spent_us
        self._round = 0
        self._in_turn: list[float] = []
        self.chosen: int | None = None
        self._queue = [
            self._turn(index, steps)
            for index, candidate in enumerate(self.candidates)
            if (steps := _LOOK_STEPS if index == current else self._look_steps(candidate))
        ]
        if len(self.candidates) == 1:
            self.chosen, self._queue = 0, []

    @property
    def turn(self) -> TrialTurn | None:
        """The next turn; None after the decision."""
        return self._queue[0] if self._queue else None

    def took(self, us: float) -> None:
        """Add the time of a step of the turn, on the slowest rank."""
        turn = self._queue[0]
        self._in_turn.append(us)
        self._total_us += us
        self.steps += 1
        cycle = self.candidates[turn.candidate].cycle
        hopeless = us > _HOPELESS * cycle * min(self._best_us or math.inf, self._known_us)
        if len(self._in_turn) < turn.steps and not hopeless:
            return
        self.times[turn.candidate] += _means(self._in_turn[1:] or self._in_turn, cycle)
        self._in_turn = []
        self._queue.pop(0)
        # every candidate has a first turn: the best may come last
        if self._round and self.cost_us > allowance_us(self._best_us, self.plain_us):
            self._queue = []
            self._choose()
        elif not self._queue:
            self._next_round()

    def spend(self, us: float) -> None:
        """Add time spent on deciding beside steps."""
        self._total_us += us

    def leave_out(self) -> None:
        """Leave out the candidate of the turn, which cannot run."""
        turn = self._queue.pop(0)
        self._queue = [other for other in self._queue if other.candidate != turn.candidate]
        if not self._queue:
            self._next_round()

    def median_us(self, index: int) -> float | None:
        """The median of a candidate's counted steps; None if there are none."""
        return median(self.times[index]) if self.times[index] else None

    @property
    def cost_us(self) -> float:
        """The time spent so far, minus the time of equally many steps of the best plan."""
        return max(0.0, self._total_us - self.steps * self._best_us)

    @property
    def plain_us(self) -> float:
        """Time of a step of plain all-reduce, measured or else predicted; 0 if it is no candidate."""
        if (index := self._plain) is None:
            return 0.0
        return self.median_us(index) or self.candidates[index].predicted_us

    @property
    def _plain(self) -> int | None:
        return next((index for index, candidate in enumerate(self.candidates) if candidate.plain), None)

    @property
    def _best_us(self) -> float:
        """Time of a step of the best plan so far."""
        measured = [index for index, times in enumerate(self.times) if times]
        return median(self.times[min(measured, key=self._to_loss_us)]) if measured else 0.0

    def _to_loss_us(self, index: int) -> float:
        """The time for the progress of one step of plain all-reduce."""
        return median(self.times[index]) * self.candidates[index].steps_for_one

    def _look_steps(self, candidate: Candidate) -> int:
        """Steps of the first turn: for plain all-reduce fewer, or none, if it is predicted to be much slower."""
        if not candidate.plain or len(self.candidates) == 1 or candidate.predicted_us <= _PLAIN_FACTOR * self._known_us:
            return _LOOK_STEPS
        return int(candidate.predicted_us <= _HOPELESS * self._known_us)

    def _turn(self, index: int, steps: int) -> TrialTurn:
        """A turn of at least so many steps: one that does not count, and whole cycles."""
        cycle = self.candidates[index].cycle
        return TrialTurn(index, 1 + cycle * -(-(steps - 1) // cycle))

    def _next_round(self) -> None:
        self._round += 1
        best = min((self._to_loss_us(index) for index, times in enumerate(self.times) if times), default=0.0)
        left = [index for index in range(len(self.candidates)) if self._goes_on(index, best)]
        left = sorted(sorted(left, key=self._to_loss_us)[: _LEFT[min(self._round, len(_LEFT)) - 1]])
        if len(left) > 1 and self._round < (_MOST_ROUNDS if self.current is None else _ROUNDS):
            second = sorted(self._to_loss_us(index) for index in left)[1]
            if self._round < _ROUNDS or second <= _CLEAR * best:
                self._queue = [self._turn(index, _TURN_STEPS) for index in left]
                return
        self._choose()

    def _goes_on(self, index: int, best_us: float) -> bool:
        times, candidate = self.times[index], self.candidates[index]
        if not times:
            return False
        if self._round > 1:
            return self._to_loss_us(index) <= _TURN_FACTOR * best_us
        # of a first turn's two steps the faster one counts
        return min(times) * candidate.steps_for_one <= (_PLAIN_FACTOR if candidate.plain else _LOOK_FACTOR) * best_us

    def _choose(self) -> None:
        medians = {index: self._to_loss_us(index) for index, times in enumerate(self.times) if times}
        if not medians:
            self.chosen = self._plain if self._plain is not None else 0
            return
        current, plain = self.current, self._plain
        best = min(medians, key=lambda index: (medians[index], index))
        if best != plain:
            alike = [i for i in medians if i != plain and medians[i] <= (1 + ALIKE) * medians[best]]
            best = min(alike, key=lambda index: (self.candidates[index].loss, medians[index], index))
        if current in medians and medians[best] > (1 - HYSTERESIS) * medians[current]:
            best = current
        if plain in medians and best != plain:
            # the current plan only has to be faster at all
            least = 0.0 if best == current else GAIN
            if medians[best] > (1 - least) * medians[plain]:
                best = plain
        self.chosen = best


def _means(times: Sequence[float], cycle: int) -> list[float]:
    """Means over whole cycles; the mean of all times if there is no whole cycle."""
    whole = [fmean(times[at : at + cycle]) for at in range(0, len(times) - cycle + 1, cycle)]
    return whole or [fmean(times)]
