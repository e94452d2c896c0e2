"""Watches a running job after a decision: exchanges step times between ranks, and requests a new decision after a change.

`changes` finds the signs of a change in the numbers. This module does the communication: ranks exchange their step
times, and measure the links again before a change of links counts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from gradwire.auto.changes import WINDOW, ChangeSigns
from gradwire.auto.live import Live
from gradwire.auto.measuring import cluster_of, wire_us
from gradwire.core import Cluster, Plan
from gradwire.transport import Grid, MergedValues

_MOST_SECONDS = 0.3
"""Longest time, in seconds, for measuring one kind of link and for the planner's search. `PATIENCE` may extend it."""
_STEPS_WORTH = 0.1
"""Longest time for the same work, in steps. The shorter of the two limits counts."""
LINK_CHANGED, _LINK_PART = 1.3, 0.1
"""The links have changed if the wire time of a step's messages differs by this factor, and by this share of a step."""
_PROBES_US, _PROBES_PART = 1e6, 0.01
"""Limits of the time of measuring links: microseconds, and share of the run. Links are measured below the sum of both."""
_FIRST_WAIT = 32
"""Steps from a decision to another one about batch size or computation time. Doubles if the same plan is chosen again."""


def seconds_for(step_us: float) -> float:
    """Return the time for measuring one kind of link, and for the planner's search, in a job with steps of this length."""
    return min(_MOST_SECONDS, _STEPS_WORTH * step_us / 1e6)


class DecisionRequest(NamedTuple):
    """The request for a new decision, with its reason."""

    why: str
    step_us: float
    compute: float
    """Computation time of a step now over the computation time when the plan was chosen."""


class ChangeWatch:
    """Merges step times of all ranks every few steps, and reads the result one step later, without waiting.

    A sign of changed links counts only if a measurement of the links confirms it. All ranks see the same numbers, so
    all ranks request a decision in the same step.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        """The links when the plan was chosen. Set before the first step."""
        self.compute_us = 0.0
        """The usual computation time of a step on this rank in the last window; 0 before the first one ended."""
        self.inputs = 0.0
        """The usual size of inputs in these steps."""
        self.measured_step = -1
        """The last step after which links were measured."""
        self.read: tuple[Sequence[float], Sequence[float]] | None = None
        """The times of steps and of their computation on the slowest rank, if a window was read after the last step."""
        self._signs = ChangeSigns()
        self._wait = _FIRST_WAIT
        self._spent_us = self._ran_us = 0.0
        """Time of measuring links, and of all watched steps. Equal on all ranks."""

    def begin(self, live: Live, plan: Plan, same: bool, compute_us: float) -> None:
        """Start to watch a newly chosen plan. same: whether the plan ran before the decision too. compute_us: the
        computation time of a step for which the plan was chosen; 0 if unknown."""
        self._wait = 2 * self._wait if same else _FIRST_WAIT
        self._not_before, self._compute_us = live.step + self._wait, compute_us
        self._signs.begin(compute_us)
        self.runs(plan)

    def runs(self, plan: Plan, judged: bool = True) -> None:
        """Read windows of this plan from now on, and compare them with the same values as before. Not judged: windows of a plan
        that is only being tried are read, and say nothing about changes."""
        self._judged = judged
        self._cycle: deque[tuple[float, float]] = deque(maxlen=plan.schedule.exchanges)
        """Times of the steps of a cycle. Their mean counts, because steps with a correction take longer than others."""
        self._window: list[tuple[float, float, float, float]] = []
        self._waiting: Callable[[], MergedValues | None] | None = None
        """Returns the merged values of the window that ended one step before."""

    @property
    def sees_change(self) -> bool:
        """Whether the last window had a sign of a change, which need not have counted yet."""
        return self._signs.seen

    def step(self, live: Live, us: float) -> DecisionRequest | None:
        """Add the time of a step on this rank. Returns a request if a new decision is due. All ranks return the same."""
        self._cycle.append((us, live.link_us))
        step_us, link_us = (fmean(column) for column in zip(*self._cycle, strict=True))
        self._window.append((step_us, link_us, max(0.0, step_us - live.exposed_us), live.inputs))
        asked: DecisionRequest | None = None
        self.read = None
        if self._waiting is not None and (merged := self._waiting()) is not None:
            self._waiting = None
            asked = self._read(live, merged)
        if len(self._window) == WINDOW:
            steps_us, links_us, computes_us, inputs = zip(*self._window, strict=True)
            self.compute_us, self.inputs = median(computes_us), median(inputs)
            self._waiting = live.merge([*steps_us, *(-us for us in links_us), *computes_us], inputs)
            self._window = []
        return asked

    def _read(self, live: Live, merged: MergedValues) -> DecisionRequest | None:
        """Evaluate one window."""
        steps_us, links_us, computes_us = (merged.most[at : at + WINDOW] for at in range(0, 3 * WINDOW, WINDOW))
        self.read = steps_us, computes_us
        self._ran_us += sum(steps_us)
        if not self._judged:
            return None
        # of links that of the rank that waited least for others
        change = self._signs.window(steps_us, [-us for us in links_us], computes_us, merged.sums)
        if change is None:
            return None
        if change.of == "links":
            return self._of_links(live, steps_us[-1])
        if live.step < self._not_before:
            return None
        if change.of == "batch":
            return DecisionRequest(f"the inputs are {change.batch:.2f} times as large as before", steps_us[-1], change.compute)
        return DecisionRequest(f"computation takes {change.compute:.2f} times as long as planned", steps_us[-1], change.compute)

    def _of_links(self, live: Live, step_us: float) -> DecisionRequest | None:
        """Measure the links. If the links are unchanged, a busy processor delayed the exchanges."""
        if self._spent_us > _PROBES_US + _PROBES_PART * self._ran_us:
            return None
        before = self.cluster
        assert before is not None
        began = time.perf_counter()
        now = cluster_of(live, seconds_for(step_us))
        self.measured_step = live.step
        took_us = 1e6 * (time.perf_counter() - began)
        rows = live.exchange([took_us, *live.bytes_between_nodes])()  # on a ring and in a tree ranks send differently
        took_us = max(row[0] for row in rows)
        nbytes = _most_of_a_link(live.grid, [row[1:] for row in rows])
        self._spent_us += took_us
        then_us, now_us = (wire_us(each, live.plan, nbytes) for each in (before, now))
        factor = now_us / then_us if then_us > 0 else 1.0
        if max(factor, 1 / factor) < LINK_CHANGED or abs(now_us - then_us) < _LINK_PART * step_us:
            self._signs.begin(self._compute_us)
            return None
        self.cluster = now
        return DecisionRequest(f"the messages of a step take {factor:.2f} times as long as before", step_us, 1.0)


def _most_of_a_link(grid: Grid, rows: Sequence[Sequence[float]]) -> list[float]:
    """The most bytes that pass a link, by bucket: those of all ranks of a node, which share its rate; with one node of one rank.
    rows: what each rank sends."""
    senders = grid.members if grid.nodes > 1 else [(rank,) for rank in range(grid.world_size)]
    of_links = [[sum(column) for column in zip(*(rows[rank] for rank in ranks), strict=True)] for ranks in senders]
    return [max(column) for column in zip(*of_links, strict=True)]
