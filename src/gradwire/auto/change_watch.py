"""Watches a live run after a decision, and says when to decide again: when the links have changed, or the batch."""

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from gradwire.auto.changes import WINDOW, Signs
from gradwire.auto.live import Live
from gradwire.auto.measuring import cluster_of, wire_us
from gradwire.core import Cluster, Plan

_MOST_SECONDS = 0.3
"""The most time for measuring a kind of link, but for `PATIENCE` of the profiler, and for the planner's search."""
_STEPS_WORTH = 0.1
"""The same in steps: the shorter of the two counts."""
LINK_CHANGED, _LINK_PART = 1.3, 0.1
"""Links have changed if their time for a step's messages differs by this factor, and by this part of a step."""
_PROBES_US, _PROBES_PART = 1e6, 0.01
"""Links are measured as long as that has taken no more than so much and this part of the run together."""
_FIRST_WAIT = 32
"""Steps after a decision until a new batch or other computation is answered. Doubles after a decision for the same plan."""


def seconds_for(step_us: float) -> float:
    """The time for measuring a kind of link, and for the planner's search, in a job with such steps."""
    return min(_MOST_SECONDS, _STEPS_WORTH * step_us / 1e6)


class Asked(NamedTuple):
    """A new decision is needed."""

    why: str
    step_us: float
    compute: float
    """Time of computation now over the time when the plan was chosen."""


class Watcher:
    """Every few steps ranks exchange the times of these steps, and read the answer a step later, without waiting.

    A sign of changed links is believed when a measurement confirms it. All ranks see the same numbers, so all do the same.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        """The links when the plan was chosen; set before the first step."""
        self.measured_step = -1
        """The last step after which links were measured."""
        self._signs = Signs()
        self._wait = _FIRST_WAIT
        self._spent_us = self._ran_us = 0.0
        """Time of measuring links, and of the steps that were watched: the same on all ranks."""

    def begin(self, live: Live, plan: Plan, same: bool, compute_us: float) -> None:
        """This plan was chosen. `same`: it ran before, too. `compute_us`: time of a step's computation that it was made for, 0 if
        unknown."""
        self._wait = 2 * self._wait if same else _FIRST_WAIT
        self._not_before, self._compute_us = live.step + self._wait, compute_us
        self._signs.begin(compute_us)
        self._cycle: deque[tuple[float, float]] = deque(maxlen=plan.schedule.exchanges)
        """Times of the steps of a cycle. Their mean counts, because a correction takes longer than other steps."""
        self._window: list[tuple[float, float, float, float]] = []
        self._waiting: Callable[[], list[list[float]]] | None = None
        """Returns the values of a window on all ranks, which were sent a step before."""

    def step(self, live: Live, us: float) -> Asked | None:
        """A step took so long on this rank. Returns whether there has to be a new decision, on all ranks alike."""
        self._cycle.append((us, live.link_us))
        step_us, link_us = (fmean(column) for column in zip(*self._cycle, strict=True))
        self._window.append((step_us, link_us, max(0.0, step_us - live.exposed_us), live.inputs))
        asked = None
        if self._waiting is not None:
            rows, self._waiting = self._waiting(), None
            asked = self._read(live, rows)
        if len(self._window) == WINDOW:
            self._waiting = live.exchange([value for column in zip(*self._window, strict=True) for value in column])
            self._window = []
        return asked

    def _read(self, live: Live, rows: list[list[float]]) -> Asked | None:
        """rows: for each rank the times of steps, of links and of computation, and the inputs, of the steps of a window."""
        columns = list(zip(*rows, strict=True))
        steps, links, computes, inputs = (columns[at : at + WINDOW] for at in range(0, 4 * WINDOW, WINDOW))
        steps_us = [max(ranks) for ranks in steps]
        self._ran_us += sum(steps_us)
        change = self._signs.window(
            steps_us,
            links_us=[min(ranks) for ranks in links],  # of the rank that waited least for others
            computes_us=[max(ranks) for ranks in computes],
            inputs=[sum(ranks) for ranks in inputs],
        )
        if change is None:
            return None
        if change.of == "links":
            return self._of_links(live, steps_us[-1])
        if live.step < self._not_before:
            return None
        if change.of == "batch":
            return Asked(f"the inputs are {change.batch:.2f} times as large as before", steps_us[-1], change.compute)
        return Asked(f"computation takes {change.compute:.2f} times as long as planned", steps_us[-1], change.compute)

    def _of_links(self, live: Live, step_us: float) -> Asked | None:
        """Measure the links. If they are as before, a busy processor delayed the exchanges."""
        if self._spent_us > _PROBES_US + _PROBES_PART * self._ran_us:
            return None
        before = self.cluster
        assert before is not None
        now = cluster_of(live, seconds_for(step_us))
        self.measured_step = live.step
        self._spent_us += 2e6 * seconds_for(step_us)
        nbytes = live.bytes_between_nodes
        then_us, now_us = (wire_us(each, live.plan, nbytes) for each in (before, now))
        factor = now_us / then_us if then_us > 0 else 1.0
        if max(factor, 1 / factor) < LINK_CHANGED or abs(now_us - then_us) < _LINK_PART * step_us:
            self._signs.begin(self._compute_us)
            return None
        self.cluster = now
        return Asked(f"the messages of a step take {factor:.2f} times as long as before", step_us, 1.0)
