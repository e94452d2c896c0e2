"""The time of each step, from the end of the step before to its own end. Pure: no communication.

Between the end of a step and the next forward the script steps the optimizer, loads a batch, and sometimes evaluates or saves.
This part counts with its median under the same plan, so that an evaluation does not look like a slow plan. The rest of the step,
in which every schedule waits for its exchange, counts as measured.

>>> pace = Pace()
>>> [round(pace.step(began_s, ended_s), 1) for began_s, ended_s in ((0.0, 0.9), (1.0, 1.9), (2.0, 2.9), (60.0, 60.9))]
[0.0, 0.9, 1.9, 59.9]
"""

from collections import deque
from statistics import median_low

__all__ = ["Pace"]

_KEPT = 15


class Pace:
    """Receives the beginnings and ends of steps."""

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
