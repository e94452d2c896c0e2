"""The time of each step, and whether times have changed since a plan was chosen. Pure: no communication.

Two times are compared, as medians over windows of steps: the time of a step, and the time of its lanes on links. The second
changes even if a faster link does not make a step faster, because the step computes meanwhile. A large change is reported at
once, a small one after two windows in a row.

After each decision there is a wait before the next report. The wait doubles after a decision without effect: the same plan, or
one that ran not long ago. So plans do not alternate when times do.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

WINDOW = 8
"""Steps of a window."""
_LARGE, _SMALL = 1.8, 1.25
"""Factors between the times of a step before and now."""
_LARGE_LINK, _SMALL_LINK = 3.0, 1.6
"""The same for times on links, which vary more."""
_LINK_PART = 0.1
"""Times on links count if they are at least this part of a step, before or now."""
_FIRST_WAIT, _MOST_WAIT = 32, 8192
_KEPT = 15
"""Times between steps that count in their median."""


class Drift(NamedTuple):
    """The change since the plan was chosen."""

    step: float
    """Time of a step now over the time before."""
    link: float
    """Time of lanes on links now over the time before."""

    @property
    def of_links(self) -> bool:
        """Whether the links changed, not only the computation."""
        return max(self.link, 1 / self.link) > _SMALL

    def __str__(self) -> str:
        return f"steps take {self.step:.2f} times as long as before, exchanges {self.link:.2f} times as long"


class Watch:
    """Compares the windows of a run."""

    def __init__(self) -> None:
        self._plan = ""
        self._left_at: dict[str, int] = {}
        self._wait = _FIRST_WAIT
        self._step_us, self._link_us = 0.0, 0.0
        self._settled = False
        self._not_before = 0
        self._before: tuple[int, int] = (0, 0)
        """The directions of the changes of step and links in the last window: -1, 0 or 1."""

    def chosen(self, step: int, plan: str, step_us: float) -> None:
        """A plan runs from this step on. `plan` identifies the plan; `step_us` is its time in the trial, 0 if unknown."""
        returned = plan in self._left_at and step - self._left_at[plan] < 8 * self._wait
        led_nowhere = bool(self._plan) and (plan == self._plan or returned)
        self._wait = min(_MOST_WAIT, 2 * self._wait) if led_nowhere else _FIRST_WAIT
        if self._plan and plan != self._plan:
            self._left_at[self._plan] = step
        self._plan, self._not_before = plan, step + self._wait
        self._step_us, self._link_us, self._settled, self._before = step_us, 0.0, False, (0, 0)

    def window(self, step: int, steps_us: Sequence[float], links_us: Sequence[float]) -> Drift | None:
        """Add the times of the steps until this one, of the slowest rank, and the times on links, of the rank that waited least.
        Returns the change if there should be a new decision."""
        step_us, link_us = median(steps_us), median(links_us)
        if not self._settled:
            # times measured in a trial's turns are a little longer than later ones
            self._settled, self._link_us = True, link_us
            if self._step_us / _SMALL < step_us < self._step_us * _SMALL or not self._step_us:
                self._step_us = step_us
        drift = Drift(_ratio(step_us, self._step_us), _ratio(link_us, self._link_us))
        counts = max(link_us, self._link_us) >= _LINK_PART * step_us
        large = (_direction(drift.step, _LARGE), counts * _direction(drift.link, _LARGE_LINK))
        small = (_direction(drift.step, _SMALL), counts * _direction(drift.link, _SMALL_LINK))
        again = any(now and now == before for now, before in zip(small, self._before, strict=True))
        self._before = small
        return drift if step >= self._not_before and (any(large) or again) else None


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
