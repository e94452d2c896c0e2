"""How long steps take, from end to end. Pure: talks to nobody.

A step lasts from the end of the last one to its own. In part of that time the script does what it likes: from the end of the
last step to the forward of this one it steps the optimizer and loads a batch, and now and then it evaluates or saves. That part
counts with its median under the same plan, so that an evaluation is not taken for a slow plan. The rest, in which the exchange
of any schedule is waited for, counts as it is.

>>> pace = Pace()
>>> [round(pace.step(began_s, ended_s), 1) for began_s, ended_s in ((0.0, 0.9), (1.0, 1.9), (2.0, 2.9), (60.0, 60.9))]
[0.0, 0.9, 1.9, 59.9]
"""

from collections import deque
from statistics import median_low

__all__ = ["Pace"]

_KEPT = 15


class Pace:
    """Sees when steps begin and end."""

    def __init__(self) -> None:
        self._between: dict[int, deque[float]] = {-1: deque(maxlen=_KEPT)}
        """By plan, seconds from the end of a step to the forward of the next."""
        self._plan = -1
        self.mark_s: float | None = None
        """When the last step ended; None before the first."""
        self._follows = False
        """Whether nothing but the script's own doing came after that."""

    @property
    def usual_s(self) -> float:
        """What usually lies between two steps of the running plan."""
        between = self._between[self._plan]
        return median_low(between) if between else 0.0

    def step(self, began_s: float, ended_s: float) -> float:
        """A step's forward began, and now it ended. Returns when it would have begun, with all that comes before, if nothing
        unusual had come between."""
        if self.mark_s is not None and self._follows:
            self._between[self._plan].append(began_s - self.mark_s)
        self.mark_s, self._follows = ended_s, True
        return began_s - self.usual_s

    def runs(self, plan: int) -> None:
        """From now on another plan runs, known by a number. Its first steps are compared with what was usual before."""
        if plan not in self._between:
            self._between[plan] = deque([self.usual_s], maxlen=_KEPT)
        self._plan = plan
        self.pause()

    def pause(self) -> None:
        """What comes until the next step is not to be seen."""
        self._follows = False

    def forget(self) -> None:
        """Numbers of plans mean others from now on."""
        self._between = {-1: deque([self.usual_s], maxlen=_KEPT)}
        self._plan = -1
        self.pause()
