"""The time of each step, and whether a link or the batch has changed since a plan was chosen. Pure: no communication.

Processor and wire are watched apart. A processor that is busy for a while makes steps longer; that asks for no other plan. Two
signs do: the time of lanes on links, and the elements of the inputs of a step. The first is only a sign: a busy processor delays
lanes, too. So the driver measures the links before it believes it. A third sign corrects a decision that was made while the
processor was busy: computation that takes far longer or shorter than planned, for many windows in a row.

Values are medians over windows of steps. A large change counts at once, a small one after two windows in a row.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

WINDOW = 4
"""Steps of a window."""
LARGE_LINK, SMALL_LINK = 2.5, 1.5
"""Factors between the times on links before and now."""
BATCH = 1.25
"""The factor between the elements of a step's inputs before and now; it counts after two windows."""
COMPUTE, _COMPUTE_WINDOWS = 2.0, 10
"""The factor between the time of computation now and as planned; it counts after so many windows in a row."""
_LINK_PART = 0.1
"""Times on links count if they are at least this part of a step, before or now."""
_KEPT = 15
"""Times between steps that count in their median."""


class Change(NamedTuple):
    """Values now over those since the plan was chosen."""

    link: float
    """Time of lanes on links."""
    batch: float
    """Elements of the inputs of a step."""
    compute: float
    """Time of a step without its wait for exchanges."""
    of: str
    """What seems to have changed: links, batch or compute."""


class Signs:
    """Compares the windows of a run with the first window after `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, compute_us: float = 0.0) -> None:
        """The next window is what later ones are compared with. `compute_us`: the time of computation that a plan is made for, 0
        for that of the next window."""
        self._first: tuple[float, float] | None = None
        self._compute_us = compute_us
        self._before = (0, 0, 0)
        """The directions of the changes of links, batch and computation in the last window: -1, 0 or 1."""
        self._in_a_row = 0
        """Windows in a row in which computation took far longer, or far shorter."""

    def window(
        self,
        steps_us: Sequence[float],
        links_us: Sequence[float],
        computes_us: Sequence[float],
        inputs: Sequence[float],
    ) -> Change | None:
        """Add the values of the steps until now: times of steps and computation, of the slowest rank; times on links, of the rank
        that waited least; elements of inputs, of all ranks. Returns a change if there is a sign of one."""
        now, compute_us = (median(links_us), median(inputs)), median(computes_us)
        if self._first is None:
            self._first, self._compute_us = now, self._compute_us or compute_us
        link, batch = (_ratio(*both) for both in zip(now, self._first, strict=True))
        compute = _ratio(compute_us, self._compute_us)
        counts = max(now[0], self._first[0]) >= _LINK_PART * median(steps_us)
        signs = counts * _direction(link, SMALL_LINK), _direction(batch, BATCH), _direction(compute, COMPUTE)
        again = [sign != 0 and sign == before for sign, before in zip(signs, self._before, strict=True)]
        self._before, self._in_a_row = signs, self._in_a_row + 1 if again[2] else abs(signs[2])
        if again[0] or counts * _direction(link, LARGE_LINK):
            return Change(link, batch, compute, "links")
        if again[1]:
            return Change(link, batch, compute, "batch")
        return Change(link, batch, compute, "compute") if self._in_a_row >= _COMPUTE_WINDOWS else None


def _ratio(now: float, before: float) -> float:
    return now / before if now > 0 and before > 0 else 1.0


def _direction(ratio: float, factor: float) -> int:
    return (ratio >= factor) - (ratio <= 1 / factor)


class Pace:
    """The time of each step, from the end of the step before to its own end.

    Between the end of a step and the next forward the script steps the optimizer, loads a batch, and sometimes evaluates or
    saves. This part counts with its median under the same plan, so that an evaluation does not look like a slow plan. The rest
    of the step, in which every schedule waits for its exchange, counts as measured.

    >>> pace = Pace()
    >>> [round(pace.step(began_s, ended_s), 1) for began_s, ended_s in ((0.0, 0.9), (1.0, 1.9), (2.0, 2.9), (60.0, 60.9))]
    [0.0, 0.9, 1.9, 59.9]
    """

    def __init__(self) -> None:
        self._between: dict[int, deque[float]] = {-1: deque(maxlen=_KEPT)}
        """By plan, seconds from the end of a step to the forward of the next."""
        self._plan = -1
        self.mark_s: float | None = None
        """The end of the last step; None before the first."""
        self._follows = False
        """Whether the time since then is the script's alone, without changes of plan or pauses."""

    @property
    def usual_s(self) -> float:
        """The median time between two steps of the running plan."""
        between = self._between[self._plan]
        return median_low(between) if between else 0.0

    def step(self, began_s: float, ended_s: float) -> float:
        """Add a step with the forward at `began_s`. Returns the start of the step: `began_s` minus the usual time between."""
        if self.mark_s is not None and self._follows:
            self._between[self._plan].append(began_s - self.mark_s)
        self.mark_s, self._follows = ended_s, True
        return began_s - self.usual_s

    def runs(self, plan: int) -> None:
        """Another plan runs from now on, known by a number. The time between steps so far is its first value."""
        if plan not in self._between:
            self._between[plan] = deque([self.usual_s], maxlen=_KEPT)
        self._plan = plan
        self.pause()

    def pause(self) -> None:
        """Leave out the time until the next step."""
        self._follows = False

    def forget(self) -> None:
        """The numbers of plans get new meanings."""
        self._between, self._plan = {-1: deque([self.usual_s], maxlen=_KEPT)}, -1
        self.pause()
