"""Whether times are still as they were when a plan was chosen. Pure: talks to nobody.

Two signs are watched, as medians over windows of steps: how long a step takes, and how long its lanes were busy with links. The
second tells of a link that became faster though the step, which computes meanwhile, did not. A large change counts at once, a
small one when two windows in a row show it.

After each decision it waits for some steps before it reports again. The wait doubles when a decision led nowhere: the same plan
again, or one that was left not long ago. So times that go up and down cannot make plans do the same.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["WINDOW", "Drift", "Watch"]

WINDOW = 8
"""Steps of a window."""
_LARGE, _SMALL = 1.8, 1.25
"""Factors by which steps become longer or shorter."""
_LARGE_LINK, _SMALL_LINK = 3.0, 1.6
"""The same of the time on links, which is less even."""
_LINK_PART = 0.1
"""Links count where they take at least so much of a step, before or after."""
_FIRST_WAIT, _MOST_WAIT = 32, 8192


class Drift(NamedTuple):
    """What changed since the plan was chosen."""

    step: float
    """Length of a step now, over what it was."""
    link: float
    """Time that lanes are busy with links, over what it was."""

    @property
    def of_links(self) -> bool:
        """Whether links changed, and not computation alone."""
        return max(self.link, 1 / self.link) > _SMALL

    def __str__(self) -> str:
        return f"steps take {self.step:.2f} times as long as before, exchanges {self.link:.2f} times"


class Watch:
    """Sees the windows of a run."""

    def __init__(self) -> None:
        self._plan = ""
        self._left_at: dict[str, int] = {}
        self._wait = _FIRST_WAIT
        self._step_us, self._link_us = 0.0, 0.0
        self._settled = False
        self._not_before = 0
        self._before: tuple[int, int] = (0, 0)
        """In which directions step and links had drifted in the last window: -1, 0 or 1."""

    def chosen(self, step: int, plan: str, step_us: float) -> None:
        """From this step on a plan runs that took so long in the trial. `plan` is a word that tells plans apart."""
        returned = plan in self._left_at and step - self._left_at[plan] < 8 * self._wait
        led_nowhere = bool(self._plan) and (plan == self._plan or returned)
        self._wait = min(_MOST_WAIT, 2 * self._wait) if led_nowhere else _FIRST_WAIT
        if self._plan and plan != self._plan:
            self._left_at[self._plan] = step
        self._plan, self._not_before = plan, step + self._wait
        self._step_us, self._link_us, self._settled, self._before = step_us, 0.0, False, (0, 0)

    def window(self, step: int, steps_us: Sequence[float], links_us: Sequence[float]) -> Drift | None:
        """Times of the steps until this one, of the slowest rank, and those on links, of the rank that waited least.

        Returns what drifted, if it is time to do something about it.
        """
        step_us, link_us = median(steps_us), median(links_us)
        if not self._settled:
            # what a trial measures in turns is a little more than what follows
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
