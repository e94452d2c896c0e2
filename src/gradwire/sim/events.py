"""The event loop: one step after another over four resources, in whole femtoseconds.

Whole numbers make sums independent of their order and ties true ties, so a step has one timeline, to the last bit.

One rule decides everything. When a task ends, the loop first ends all tasks of the same moment; then every free resource takes
the first task of its queue. The order of the queues:
- on compute: codec tasks that a link waits for, in launch order; then last decodes; then backward and forward; then late decodes;
- on a link: strictly by launch order, or, with lanes, by the time at which tasks became ready;
- in the CPU pool: by the time at which tasks became ready.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

COMPUTE, POOL, INTRA, INTER = range(4)
RESOURCES = ("compute", "cpu pool", "intra link", "inter link")

NOTHING, WHOLE_STEP = -2, -1
"""Values of `SimWork.waits` that are not a bucket's index: wait for nothing, or for an earlier step's whole exchange."""
AWAITED, LAST, LATE = 0, 1, 2
"""Urgency of a task on compute: a link waits for it; only the end of the step waits; it runs after backward and forward."""
_NOWHERE = len(RESOURCES)
"""The resource of a link task that has only latency left."""
_ONLY_FREE = 1 << 62
"""Stands in place of a row: the link is free again, and its task goes on."""
_HEARD = 1 << 61
"""Stands in place of a row, added to a step: all ranks know how its exchange went."""


class SimTask(NamedTuple):
    """One task of one piece of a bucket."""

    resource: int
    length: int
    order: int
    """Place in the step's launch order: of this link task, of the one that waits for this codec task, or of the last one."""
    urgency: int = AWAITED
    gate: int = -1
    """The bucket whose gradients must be ready, for the first task of a piece; else -1."""
    ends: int = -1
    """The bucket, for the last task of a piece; else -1."""
    free: int = 0
    """Femtoseconds at the end of a link task in which its link serves other tasks: the latency of messages. `length` has them
    too."""
    cpu: int = 0
    """Femtoseconds of the task's work on `cpu_on`, which goes on at the same time. The task ends when both have ended."""
    cpu_on: int = POOL


class SimWork(NamedTuple):
    lengths: Sequence[int]
    """Femtoseconds of the computation's parts in their order: forward, tensor by tensor, then backward."""
    waits: Sequence[int]
    """The condition of each part: NOTHING, WHOLE_STEP, or a bucket, whose exchange of the step before must be over."""
    releases: Sequence[Sequence[int]]
    """Buckets that are ready when a part ends."""
    rows: Sequence[Sequence[SimTask]]
    """Tasks of one piece, or of one lane, that follow each other."""
    pieces: Sequence[int]
    """Number of pieces of each bucket."""


class Span(NamedTuple):
    """One task of a resource, or consecutive parts of the computation."""

    start: int
    end: int
    step: int
    row: int
    """Index into `SimWork.rows`; -1 for computation."""
    first: int
    """The task in its row, or the first part of the computation."""
    until: int
    """The part of the computation after the last one. For a task 1 if this is the task's work on a processor, else 0."""


class EventRun(NamedTuple):
    """The result of the event loop."""

    computed: list[int]
    """Time at which the backward of each step ended."""
    exchanged: list[int]
    """Time at which the exchange of each step ended."""
    spans: list[Span]
    """Spans by ascending start; empty unless `record` is set."""


class EventLoop:
    """Simulates a number of steps; step s does works[s % len(works)].

    lag: a part that waits for WHOLE_STEP waits for the exchange of the step that is this many steps earlier. lanes: rows are
    lanes, and each begins its row of the next step when its row of this step has ended; without lanes each row begins when its
    gradients are ready. workers: number of tasks that the CPU pool does at once. record: whether to keep spans. reports:
    femtoseconds from an exchange's last task to its end. If there are any, no exchange begins before the last one has ended.
    """

    def __init__(
        self, works: Sequence[SimWork], steps: int, *, lag: int, lanes: bool, workers: int, record: bool, reports: int = 0
    ) -> None:
        self.steps, self.lag, self.lanes, self.record = steps, lag, lanes, record
        self.cycle = works
        self.works = [works[step % len(works)] for step in range(steps)]
        self.width = max(len(work.rows) for work in works)
        self.after = [list(accumulate(work.lengths, initial=0)) for work in works] * (steps // len(works) + 1)
        self.breaks = [_breaks(work) for work in works] * (steps // len(works) + 1)
        self.left = [list(work.pieces) for work in self.works]
        self.reports = reports
        self.left_all = [sum(work.pieces) for work in self.works]
        """Pieces of each step that have not ended, and one for its reports."""
        if reports:
            self.left_all = [left + 1 if left else 0 for left in self.left_all]
        self.under_way = [step for step in range(steps) if reports and self.left_all[step]]
        """The steps whose exchanges have reports and have not ended, in reverse order."""
        self.under_way.reverse()
        self.held: list[int] = []
        """Rows whose first task waits for the end of an earlier exchange."""
        self.ready = [[False] * len(work.pieces) for work in self.works]
        self.waiting: dict[tuple[int, int], list[int]] = {}
        self.at = [0] * (steps * self.width)
        self.open = [0] * len(self.at)
        """Number of works of each row's current task that have not ended: on a link and on a processor."""
        self.free = [1, workers, 1, 1, 0]
        self.queues: list[list[tuple[int, int, int]]] = [[], [], [], []]
        self.ending: list[tuple[int, int, int]] = []
        """(end, resource, row) of each running task, with rows counted over all steps. For computation the row is minus the index
        of the part after the last running one. The work of a task on a processor has the row plus the number of rows. Where the
        link alone is free again, the row is `_ONLY_FREE`."""
        self.due = [self._launch_order(link) for link in range(len(RESOURCES))]
        self.launched = [0, 0, 0, 0]
        self.step = self.part = 0
        self.result = EventRun([], [0] * steps, [])

    def _launch_order(self, link: int) -> list[int]:
        """The orders of all link tasks on a link over all steps, ascending."""
        if self.lanes or link not in (INTRA, INTER):
            return []
        span = 1 << 32
        orders = {id(work): sorted(t.order for row in work.rows for t in row if t.resource == link) for work in self.cycle}
        return [step * span + order for step, work in enumerate(self.works) for order in orders[id(work)]]

    def run(self) -> EventRun:
        now = 0
        for row in range(self.width if self.lanes else len(self.at)):
            self._begin_row(row, now)
        while True:
            for resource in (INTRA, INTER, POOL):
                self._start(resource, now)
            if self.free[COMPUTE]:
                self._compute(now)
            if not self.ending:
                return self.result
            now = self.ending[0][0]
            while self.ending and self.ending[0][0] == now:
                _, resource, what = heappop(self.ending)
                self.free[resource] += 1
                if what < 0:
                    self._computed(-what, now)
                elif what < _HEARD:
                    self._done(what % len(self.at), now)
                elif what != _ONLY_FREE:
                    self._heard(what - _HEARD, now)

    def _begin_row(self, row: int, now: int) -> None:
        """Start a row; with lanes, the lane's first row from this step on."""
        step, index = divmod(row, self.width)
        while self.lanes and step < self.steps and not any(self.works[step].rows[index : index + 1]):
            step += 1
        if step < self.steps and index < len(self.works[step].rows):
            self._next(step * self.width + index, now)

    def _next(self, row: int, now: int) -> None:
        """Queue the row's next task, if there is one and its gradients are ready."""
        step, index = divmod(row, self.width)
        tasks, at = self.works[step].rows[index], self.at[row]
        if at == len(tasks):
            if self.lanes:
                self._begin_row(row + self.width, now)
            return
        task = tasks[at]
        if task.gate >= 0 and not self.ready[step][task.gate]:
            self.waiting.setdefault((step, task.gate), []).append(row)
            return
        if task.gate >= 0 and self.under_way and self.under_way[-1] < step:
            self.held.append(row)
            return
        order = (step << 32) + task.order
        self.open[row] = 1
        self._queue(task.resource, task.urgency, order, row, now)
        if task.cpu:
            self.open[row] = 2
            self._queue(task.cpu_on, AWAITED, order, row + len(self.at), now)

    def _queue(self, resource: int, urgency: int, order: int, row: int, now: int) -> None:
        if resource == COMPUTE:
            key = (urgency, order, row)
        elif resource == POOL or self.lanes:
            key = (now, order, row)
        else:
            key = (order, 0, row)
        heappush(self.queues[resource], key)

    def _start(self, resource: int, now: int) -> None:
        """Give a link or the pool the first task of its queue."""
        queue = self.queues[resource]
        while self.free[resource] and queue:
            if self.due[resource] and queue[0][0] != self.due[resource][self.launched[resource]]:
                return  # the next task in launch order is another one, which is not ready
            self.launched[resource] += 1
            self._take(resource, heappop(queue)[2], now)

    def _take(self, resource: int, row: int, now: int) -> None:
        on_processor, own = divmod(row, len(self.at))
        step, index = divmod(own, self.width)
        at = self.at[own]
        task = self.works[step].rows[index][at]
        end = now + (task.cpu if on_processor else task.length)
        self.free[resource] -= 1
        if task.free and not on_processor:
            heappush(self.ending, (end - task.free, resource, _ONLY_FREE))
            resource = _NOWHERE
        heappush(self.ending, (end, resource, row))
        if self.record:
            self.result.spans.append(Span(now, end, step, index, at, on_processor))

    def _compute(self, now: int) -> None:
        """Give compute a codec task, or as many parts of the computation as no codec task can interrupt."""
        queue = self.queues[COMPUTE]
        possible = self._may_go_on()
        if queue and (queue[0][0] < LATE or not possible):
            self._take(COMPUTE, heappop(queue)[2], now)
        elif possible:
            after, part = self.after[self.step], self.part
            until = self.breaks[self.step][part]
            if self.ending:
                # parts that begin before the next event
                until = min(until, max(part + 1, bisect_left(after, self.ending[0][0] - now + after[part])))
            end = now + after[until] - after[part]
            self.free[COMPUTE] -= 1
            heappush(self.ending, (end, COMPUTE, -until))
            if self.record:
                self.result.spans.append(Span(now, end, self.step, -1, part, until))

    def _may_go_on(self) -> bool:
        """Whether the next part of the computation can run."""
        if self.step == self.steps:
            return False
        wait = self.works[self.step].waits[self.part]
        if wait == NOTHING:
            return True
        before = self.step - (self.lag if wait == WHOLE_STEP else 1)
        return before < 0 or not (self.left_all[before] if wait == WHOLE_STEP else self.left[before][wait])

    def _computed(self, until: int, now: int) -> None:
        work = self.works[self.step]
        for bucket in work.releases[until - 1]:
            self.ready[self.step][bucket] = True
            for row in self.waiting.pop((self.step, bucket), ()):
                self._next(row, now)
        self.part = until
        if until == len(work.lengths):
            self.result.computed.append(now)
            self.step, self.part = self.step + 1, 0

    def _done(self, row: int, now: int) -> None:
        self.open[row] -= 1
        if self.open[row]:
            return
        step, index = divmod(row, self.width)
        task = self.works[step].rows[index][self.at[row]]
        self.at[row] += 1
        if task.ends >= 0:
            self.left[step][task.ends] -= 1
            self.left_all[step] -= 1
            if not self.left_all[step]:
                self.result.exchanged[step] = now
            elif self.reports and self.left_all[step] == 1:
                heappush(self.ending, (now + self.reports, _NOWHERE, _HEARD + step))
        self._next(row, now)

    def _heard(self, step: int, now: int) -> None:
        """The exchange of a step has ended: that of the next one may begin."""
        self.left_all[step] -= 1
        self.result.exchanged[step] = now
        self.under_way.pop()
        held, self.held = self.held, []
        for row in held:
            self._next(row, now)


def _breaks(work: SimWork) -> list[int]:
    """For each part, the first later part that may wait, or before which buckets become ready."""
    breaks, following = [], len(work.lengths)
    for part in reversed(range(len(work.lengths))):
        if work.releases[part] or (part + 1 < len(work.waits) and work.waits[part + 1] != NOTHING):
            following = part + 1
        breaks.append(following)
    return breaks[::-1]
