"""Finds signs that a link, the batch or the computation has changed since a plan was chosen. Pure: no communication.

`change_watch` exchanges the numbers between ranks and acts on the signs.

Two signs ask for another plan: the time of lanes on links, and the number of elements in a step's inputs. A processor
that is busy for a while makes steps longer, but asks for no other plan. A busy processor delays lanes too, so the
caller measures the links before a change of links counts. A third sign corrects a decision that was made while the
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
"""Factors between link times before and now: the large one counts at once, the small one after two windows."""
BATCH = 1.25
"""Factor between the input elements of a step before and now. Counts after two windows."""
COMPUTE, _COMPUTE_WINDOWS = 2.0, 10
"""Factor between the computation time now and the planned one, and the number of windows in a row after which it counts."""
_LINK_PART = 0.1
"""Link times count if they are at least this share of a step, before or now."""
_KEPT = 15
"""Number of times between steps that enter their median."""


class Change(NamedTuple):
    """A sign of a change. Each number is the value now over the value when the plan was chosen."""

    link: float
    """Time of lanes on links."""
    batch: float
    """Elements of the inputs of a step."""
    compute: float
    """Time of a step without the wait for exchanges."""
    of: str
    """The changed thing: "links", "batch" or "compute"."""


class ChangeSigns:
    """Compares windows of steps with the first window after `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, compute_us: float = 0.0) -> None:
        """Start over: compare later windows with the next one. compute_us: the computation time for which the plan was
        chosen; 0 for the time of the next window."""
        self._first: tuple[float, float] | None = None
        self._compute_us = compute_us
        self._before = (0, 0, 0)
        """The directions of the changes of links, batch and computation in the last window: -1, 0 or 1."""
        self._in_a_row = 0
        """Number of windows in a row in which computation took far longer, or far shorter."""

    @property
    def seen(self) -> bool:
        """Whether the last window had a sign, whether it counts already or not."""
        return any(self._before)

    def window(
        self, steps_us: Sequence[float], links_us: Sequence[float], computes_us: Sequence[float], inputs: Sequence[float]
    ) -> Change | None:
        """Add one window of steps. Returns a change if there is a sign of one.

        steps_us, computes_us: of the slowest rank. links_us: of the rank that waited least. inputs: elements of all ranks.
        """
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


class StepPace:
    """Measures the length of each step, from where the script goes on after the step before to the step's own end.

    Between the end of a step and the next forward the script steps the optimizer, loads a batch, and sometimes evaluates or
    saves. This part counts with its median under the same plan, so that an evaluation does not look like a slow plan. The rest
    of the step, in which every schedule waits for its exchange, counts as measured.

    >>> pace = StepPace()
    >>> [round(pace.step(began_s, ended_s), 1) for began_s, ended_s in ((0.0, 0.9), (1.0, 1.9), (2.0, 2.9), (60.0, 60.9))]
    [0.0, 0.9, 1.9, 59.9]
    """

    def __init__(self) -> None:
        self._between: dict[int, deque[float]] = {-1: deque(maxlen=_KEPT)}
        """Seconds from where the script goes on after a step to the forward of the next one, by plan."""
        self._plan = -1
        self.mark_s: float | None = None
        """When the script went on after the last step; None before the first."""
        self._follows = False
        """Whether only the script's own work lies between the last step and the next one: no change of plan and no pause."""

    @property
    def usual_s(self) -> float:
        """The median time between two steps of the running plan."""
        between = self._between[self._plan]
        return median_low(between) if between else 0.0

    def step(self, began_s: float | None, ended_s: float) -> float:
        """Add a step. Returns its start in seconds: `began_s` (None: where the script went on) less the usual time between."""
        if began_s is None:
            began_s = ended_s if self.mark_s is None else self.mark_s
        if self.mark_s is not None and self._follows:
            self._between[self._plan].append(began_s - self.mark_s)
        self.mark_s, self._follows = ended_s, True
        return began_s - self.usual_s

    def goes_on(self, now_s: float) -> None:
        """The script goes on now. What came since the end of the step, such as a wait for other ranks, was not its own work."""
        self.mark_s = now_s

    def runs(self, plan: int) -> None:
        """Note that another plan runs now. plan: its number. The usual time between steps so far is its first value."""
        if plan not in self._between:
            self._between[plan] = deque([self.usual_s], maxlen=_KEPT)
        self._plan = plan
        self.pause()

    def pause(self) -> None:
        """Leave out the time until the next step."""
        self._follows = False

    def forget(self) -> None:
        """Forget the numbers of the plans. Later calls of `runs` may give them to other plans."""
        self._between, self._plan = {-1: deque([self.usual_s], maxlen=_KEPT)}, -1
        self.pause()
