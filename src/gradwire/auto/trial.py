"""Which of several plans is fastest to a loss, told by the times of real steps that run them in turns. Pure: talks to nobody.

Turns are interleaved, A B C A B C, so that a drift of the machine hits all alike. The first turn of each is a short look; who is
clearly slower then is left out, at once if it is hopeless. The others go on until the difference is clear, or until the budget is
spent.

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

__all__ = ["Candidate", "Trial", "TrialTurn", "allowance_us"]

GAIN = 0.02
"""Plain all-reduce runs unless something is faster by more than this part."""
ALIKE = 0.02
"""Candidates whose times differ by no more than this part are alike."""
HYSTERESIS = 0.04
"""What runs already goes on unless something is faster by more than this part."""
_LOOK_STEPS, _TURN_STEPS = 3, 5
"""Of a first turn and of later ones. The first step of a turn is not counted: memory is new."""
_LOOK_FACTOR, _TURN_FACTOR = 1.25, 1.10
"""Slower than the best by more, and a candidate is left out."""
_HOPELESS = 4.0
"""A step is so many times slower than the best: the turn ends. Plain all-reduce of which that is predicted is not run."""
_PLAIN_FACTOR = 1.5
"""Plain all-reduce is looked at but not tried further where it takes so many times as long. Where that is predicted it is looked
at for one step."""
_ROUNDS, _MOST_ROUNDS = 2, 6
"""Where something runs already there are no more than the first: its times have changed, which is to be answered soon, and
what is not clearly faster does not replace it."""
_LEFT = (3, 2, 2)
"""Candidates that go on after each round, at most."""
_CLEAR = 1.05
"""The next best is so many times slower: that is clear, and no further round is needed."""


class Candidate(NamedTuple):
    """A plan that may be chosen."""

    name: str
    predicted_us: float
    plain: bool = False
    """Whether it is plain all-reduce: what everything else is compared with."""
    loss: int = 0
    """A place in the order of what costs accuracy: 0 is nothing. Of candidates that are alike in time the lowest is taken."""
    cycle: int = 1
    """Its steps are alike only in groups of so many: of each group the mean counts."""
    steps_for_one: float = 1.0
    """So many of its steps bring the loss as far as one of plain all-reduce: by this its times are compared, and nothing else."""


class TrialTurn(NamedTuple):
    """So many steps of one candidate, if none is hopeless."""

    candidate: int
    steps: int


def allowance_us(best_us: float, plain_us: float) -> float:
    """What deciding may cost beyond the chosen plan's own steps: 5 % of 1000 of them, or 20 of plain all-reduce."""
    return max(0.05 * 1000 * best_us, 20 * plain_us)


class Trial:
    """A trial in progress.

    candidates: those to try, the best by prediction first. current: the one that runs already, if any does. known_us: what a
    step takes under some plan, to tell what is hopeless. spent_us, before: what was spent on deciding before the trial, and how
    many steps are in that.
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
        """Microseconds of the steps that count, by candidate; means over its cycles."""
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
        """What to run next; None when it is decided."""
        return self._queue[0] if self._queue else None

    def took(self, us: float) -> None:
        """A step of the turn took so long, on the slowest rank."""
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
        # every candidate is looked at: the best may come last
        if self._round and self.cost_us > allowance_us(self._best_us, self.plain_us):
            self._queue = []
            self._choose()
        elif not self._queue:
            self._next_round()

    def spend(self, us: float) -> None:
        """Deciding took so long beside steps."""
        self._total_us += us

    def leave_out(self) -> None:
        """The candidate whose turn it is cannot run."""
        turn = self._queue.pop(0)
        self._queue = [other for other in self._queue if other.candidate != turn.candidate]
        if not self._queue:
            self._next_round()

    def median_us(self, index: int) -> float | None:
        """Of a candidate's steps that counted; None if there were none."""
        return median(self.times[index]) if self.times[index] else None

    @property
    def cost_us(self) -> float:
        """What deciding has cost so far: all that was spent, less what the steps would have taken under the best plan."""
        return max(0.0, self._total_us - self.steps * self._best_us)

    @property
    def plain_us(self) -> float:
        """Of plain all-reduce: measured, else predicted; 0 if it is not among the candidates."""
        index = self._plain
        if index is None:
            return 0.0
        measured = self.median_us(index)
        return self.candidates[index].predicted_us if measured is None else measured

    @property
    def _plain(self) -> int | None:
        return next((index for index, candidate in enumerate(self.candidates) if candidate.plain), None)

    @property
    def _best_us(self) -> float:
        """A step of what is best so far."""
        measured = [index for index, times in enumerate(self.times) if times]
        return median(self.times[min(measured, key=self._to_loss_us)]) if measured else 0.0

    def _to_loss_us(self, index: int) -> float:
        """What is compared: the median, times the steps that do what one of plain all-reduce does."""
        return median(self.times[index]) * self.candidates[index].steps_for_one

    def _look_steps(self, candidate: Candidate) -> int:
        """Of the first turn. Plain all-reduce has none where it is predicted to be hopeless, and one where it will hardly be
        chosen."""
        if not candidate.plain or len(self.candidates) == 1 or candidate.predicted_us <= _PLAIN_FACTOR * self._known_us:
            return _LOOK_STEPS
        return int(candidate.predicted_us <= _HOPELESS * self._known_us)

    def _turn(self, index: int, steps: int) -> TrialTurn:
        """At least so many steps: one that does not count, and whole cycles."""
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
        # after a look of two steps the faster one counts
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
            # what was faster once goes on as long as it is faster at all
            least = 0.0 if best == current else GAIN
            if medians[best] > (1 - least) * medians[plain]:
                best = plain
        self.chosen = best


def _means(times: Sequence[float], cycle: int) -> list[float]:
    """Of each whole cycle; of all if there is none."""
    whole = [fmean(times[at : at + cycle]) for at in range(0, len(times) - cycle + 1, cycle)]
    return whole or [fmean(times)]
