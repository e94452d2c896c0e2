"""Finds the plan that is fastest to a loss, from the times of real steps. Pure: no communication.

The plan with the best prediction runs first. The error of its prediction is the assumed error of all predictions. A plan does
not run if its prediction is slower by more than this error, or if it costs accuracy and is not predicted to be faster.

If several plans run, their turns are interleaved, A B C A B C, so that a slower machine affects all plans alike. There
is a second round if the best two are alike and the budget allows it. A first turn ends at once if its steps are clearly
slower than the best plan's. On a GPU the first step of a candidate compiles kernels: its time counts nowhere. A candidate with a
time from before the trial is chosen if no plan in the trial is as fast.

>>> trial = Trial([Candidate("A", 90.0), Candidate("plain", 100.0, plain=True)])
>>> while (turn := trial.turn) is not None:
...     trial.took((80.0, 100.0)[turn.candidate])
>>> trial.chosen
0
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

MOST_STEPS = 15
"""The most steps until a decision, from the first step of the run."""
LEAST_BUDGET_US, BUDGET_PLAIN_STEPS = 2e6, 5
"""A decision takes no longer than 2 s or 5 steps of plain all-reduce, whichever is more."""
GAIN = 0.02
"""Plain all-reduce is chosen unless another plan is faster by more than this share."""
ALIKE = 0.02
"""Candidates count as equally fast if their times differ by at most this share."""
HYSTERESIS = 0.04
"""The current plan is chosen unless another plan is faster by more than this share."""
PLAIN_FACTOR = 1.05
"""Plain all-reduce does not run if its prediction is above this factor times the best one, and the best measured time."""
_TURN_STEPS = 3
"""Steps of a turn, if the budget allows them. The first step does not count, because it allocates memory."""
_LEAST_ERROR, _MOST_ERROR = 0.05, 0.5
"""Bounds of the assumed error of predictions, as a share."""
_SLOW_FIRST, _SLOW = 1.5, 1.15
"""Factors that end a candidate's first turn: its first step, or a later one, takes so many times the best plan's step. The first
step touches new memory, which may take a quarter of the step of a plan that is as fast as the best one."""
_HOPELESS = 4.0
"""Factor that ends the first turn of a candidate with steps of different lengths: a step takes this many times the
cycle's length times as long as a step of the best plan."""
_MOST_ROUNDS = 1
"""Most rounds after the first turns. There is no such round if a plan runs since an earlier decision."""
_CLEAR = 1.05
"""No further round is needed if the second best takes this many times as long as the best."""


class Candidate(NamedTuple):
    """A plan in a trial."""

    name: str
    predicted_us: float
    plain: bool = False
    """Whether this is plain all-reduce."""
    loss: int = 0
    """Place in the order of accuracy, 0 for the most accurate. The lowest place is chosen among equally fast candidates."""
    cycle: int = 1
    """Number of steps in a cycle. Times vary inside a cycle, so the mean of each cycle counts."""
    steps_for_one: float = 1.0
    """Number of steps that bring the progress of one step of plain all-reduce. Compared times are multiplied by it."""
    loss_above: float = 0.0
    """How far the loss ends above synchronous SGD's at equal samples, as a share of it; only of local steps."""
    seen_us: float = 0.0
    """Longest time of a step, known from before the trial; 0 if unknown."""
    runs: bool = True
    """Whether the candidate may have a turn. Without a turn, `seen_us` alone decides."""
    steps_at_constant_rate: float = 0.0
    """The number of `steps_for_one` at a constant learning rate; 0 if it is the same. It decides nothing."""

    @property
    def to_loss_us(self) -> float:
        """The predicted time for the progress of one step of plain all-reduce."""
        return self.predicted_us * self.steps_for_one


class TrialTurn(NamedTuple):
    """Some steps of one candidate."""

    candidate: int
    steps: int


class Trial:
    """A trial in progress.

    candidates: in the order in which they run, the best prediction first. current: the index of the plan that runs since an
    earlier decision; None if there is none. steps, spent_us: the steps and the time that deciding took before the trial.
    compiles: whether the first step of a candidate may compile kernels, which takes seconds.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        current: int | None = None,
        steps: int = 0,
        spent_us: float = 0.0,
        compiles: bool = False,
    ) -> None:
        self.candidates, self.current = tuple(candidates), current
        self.times: list[list[float]] = [[] for _ in self.candidates]
        """Microseconds of the counted steps by candidate. Each number is the mean over a cycle."""
        self.steps, self.total_us = steps, spent_us
        self._compiles = compiles
        self._in_turn: list[float] = []
        self._rounds = 0
        self.chosen: int | None = None
        self._queue = [self._turn(0)]
        self._shorten()
        self._waiting = [index for index in range(1, len(self.candidates)) if self.candidates[index].runs]
        """Candidates that have had no turn yet."""
        self.left: set[int] = set()
        """Candidates that might have been the best, and did not run because the budget was spent."""

    @property
    def turn(self) -> TrialTurn | None:
        """The next turn; None after the decision."""
        return self._queue[0] if self._queue else None

    def took(self, us: float) -> None:
        """Add the time of a step of the turn, on the slowest rank."""
        turn = self._queue[0]
        self.steps += 1
        if self._compiles and not (self._in_turn or self.times[turn.candidate]):
            self._in_turn.append(us)
            return
        self._in_turn.append(us)
        self.total_us += us
        cycle = self.candidates[turn.candidate].cycle
        slow = _HOPELESS * cycle if cycle > 1 else _SLOW if len(self._in_turn) > 1 else _SLOW_FIRST
        best_us = 0.0 if self.times[turn.candidate] else self._best_us
        if len(self._in_turn) < turn.steps and not 0 < slow * best_us < us:
            return
        self.times[turn.candidate] += _means(self._in_turn[1:] or self._in_turn, cycle)
        self._in_turn = []
        self._queue.pop(0)
        self._go_on()

    def ran_on(self, us: float) -> None:
        """Add the time of a step of a turn that had ended, which ranks learned too late."""
        self.steps += 1
        self.total_us += us

    def spend(self, us: float) -> None:
        """Add time that deciding took outside steps."""
        self.total_us += us

    def leave_out(self) -> None:
        """Leave out the candidate of the turn, which cannot run."""
        turn = self._queue.pop(0)
        self._queue = [other for other in self._queue if other.candidate != turn.candidate]
        if not any(self.times) and not self._queue and self._waiting:
            self._queue = [self._turn(self._waiting.pop(0))]
        self._go_on()

    def median_us(self, index: int) -> float | None:
        """Return the median of a candidate's counted steps, or else its time from before the trial; None without both."""
        return median(self.times[index]) if self.times[index] else self.candidates[index].seen_us or None

    @property
    def cost_us(self) -> float:
        """Time spent so far, minus the time of equally many steps of the best plan."""
        compiled = sum(map(bool, self.times)) if self._compiles else 0
        return max(0.0, self.total_us - (self.steps - compiled) * self._best_us)

    @property
    def plain_us(self) -> float:
        """Time of a step of plain all-reduce, measured or else predicted; 0 if it is no candidate."""
        if (index := self._plain) is None:
            return 0.0
        return self.median_us(index) or self.candidates[index].predicted_us

    @property
    def error(self) -> float:
        """Assumed error of predictions, as a share: the error of the first candidate that ran."""
        return _MOST_ERROR if self._first is None else min(_MOST_ERROR, max(_LEAST_ERROR, abs(self._took_of_first - 1)))

    @property
    def _took_of_first(self) -> float:
        """The time of the first candidate that ran, over its prediction; 1 before that candidate ran."""
        if self._first is None:
            return 1.0
        predicted_us = self.candidates[self._first].predicted_us
        return min(self.times[self._first]) / predicted_us if predicted_us > 0 else 1 + _MOST_ERROR

    @property
    def _first(self) -> int | None:
        return next((index for index, times in enumerate(self.times) if times), None)

    @property
    def _plain(self) -> int | None:
        return next((index for index, candidate in enumerate(self.candidates) if candidate.plain), None)

    @property
    def _best_us(self) -> float:
        """Time of a step of the best plan so far; 0 before the first turn."""
        ran = [index for index, times in enumerate(self.times) if times]
        return median(self.times[min(ran, key=self._to_loss_us)]) if ran else 0.0

    def _to_loss_us(self, index: int) -> float:
        """Return the measured time for the progress of one step of plain all-reduce."""
        return median(self.times[index]) * self.candidates[index].steps_for_one

    def _turn(self, index: int) -> TrialTurn:
        """Return a turn of one step that does not count, and of whole cycles."""
        cycle = self.candidates[index].cycle
        return TrialTurn(index, 1 + cycle * -(-(_TURN_STEPS - 1) // cycle))

    def _shorten(self) -> None:
        """Shorten the next turn to one counted cycle, if it is a candidate's first turn and does not fit the budget."""
        index = self._queue[0].candidate
        if not self.times[index] and not self._fits(self._queue[0]):
            self._queue[0] = TrialTurn(index, 1 + self.candidates[index].cycle)

    def _fits(self, turn: TrialTurn) -> bool:
        """Return whether the turn ends before the budget is spent."""
        us = self.median_us(turn.candidate) or max(1.0, self._took_of_first) * self.candidates[turn.candidate].predicted_us
        budget_us = max(LEAST_BUDGET_US, BUDGET_PLAIN_STEPS * self.plain_us)
        return self.steps + turn.steps <= MOST_STEPS and self.total_us + turn.steps * us <= budget_us

    def _go_on(self) -> None:
        """Begin the next turn or the next round, or decide."""
        while self._queue:
            self._shorten()
            if self._fits(self._queue[0]) or not any(self.times):
                return
            index = self._queue.pop(0).candidate
            if not self.times[index]:
                self.left.add(index)
        if any(self.times) and self._waiting:
            self._queue, self._waiting = [self._turn(index) for index in self._waiting if self._worth(index)], []
            self._go_on()
            return
        ran = sorted((index for index, times in enumerate(self.times) if times), key=self._to_loss_us)
        close = sorted(index for index in ran if self._to_loss_us(index) <= _CLEAR * self._to_loss_us(ran[0]))
        queue = [self._turn(index) for index in close]
        more = self.current is None and self._rounds < _MOST_ROUNDS
        if more and len(close) > 1 and all(map(self._fits, queue)):
            self._rounds += 1
            self._queue = queue
            return
        self._choose()

    def _worth(self, index: int) -> bool:
        """Return whether this candidate may be the best, given the predictions and their error."""
        assert self._first is not None
        candidate, first = self.candidates[index], self.candidates[self._first]
        if candidate.plain:
            return candidate.to_loss_us <= max(PLAIN_FACTOR * first.to_loss_us, self._to_loss_us(self._first))
        # predictions of encoding plans in one schedule have similar errors
        lossier = candidate.loss > first.loss > 0 and candidate.cycle == first.cycle
        if lossier and candidate.to_loss_us > (1 - ALIKE) * first.to_loss_us:
            return False
        return candidate.to_loss_us <= (1 + self.error) * first.to_loss_us

    def _choose(self) -> None:
        medians = {
            index: us * candidate.steps_for_one
            for index, candidate in enumerate(self.candidates)
            if (us := self.median_us(index)) is not None
        }
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
            # the current plan only has to be faster by any amount
            least = 0.0 if best == current else GAIN
            if medians[best] > (1 - least) * medians[plain]:
                best = plain
        self.chosen = best


def _means(times: Sequence[float], cycle: int) -> list[float]:
    """Return the means over whole cycles; the mean of all times if there is no whole cycle."""
    whole = [fmean(times[at : at + cycle]) for at in range(0, len(times) - cycle + 1, cycle)]
    return whole or [fmean(times)]
