"""Runs the link tasks of a plan, in its launch order, on lanes.

A step of the executor:
1. `start` gives every lane its list of tasks. Lists are static: cut from the launch order once, the same on all ranks.
2. `ready(bucket)` is called as gradients become ready. A lane does its tasks strictly in order and waits for the bucket
   of the next one; it never takes another because it happens to be ready.
3. `finish` waits for all lanes, and for what else the step must wait for, and returns what the lanes measured.

Pieces (chunks of buckets) go round the lanes. On CPU a lane blocks in its collectives, so two lanes keep the wire busy
while one encodes. On CUDA nothing blocks, one lane submits everything, and the gather of a piece is put behind the
reduce of the bucket's next, so that the codec of one runs while the other is on the wire.
"""

import queue
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

from gradwire.collectives import Lane, Link, Meter
from gradwire.collectives.streams import Mark
from gradwire.core.plan import Plan
from gradwire.engine.layout import BucketBuffers

__all__ = ["Executor", "Task", "TaskFailed", "task_lists"]


@dataclass(frozen=True)
class Task:
    """One phase of one piece."""

    bucket: int
    chunk: int
    phase: int


class TaskFailed(Exception):
    """Something failed on a lane; carries where."""

    def __init__(self, task: Task, cause: Exception) -> None:
        super().__init__(f"{task}: {cause}")
        self.task, self.cause = task, cause


class Abandoned(Exception):
    """The step was given up before all buckets were ready."""


def task_lists(launch: Sequence[tuple[int, str]], chunks: Sequence[int], lanes: int, skew: bool) -> list[list[Task]]:
    """The tasks of each lane. `chunks[b]` is the number of pieces of bucket b.

    Launches of one bucket that follow each other run piece by piece; with skew the last phase of a piece comes after
    the first phase of the bucket's next.

    >>> task_lists([(0, "alltoall"), (0, "allgather")], chunks=[2], lanes=1, skew=False)[0][1]
    Task(bucket=0, chunk=0, phase=1)
    """
    done: dict[int, int] = defaultdict(int)
    order: list[Task] = []
    for bucket, run in groupby(launch, key=lambda entry: entry[0]):
        phases = range(done[bucket], done[bucket] + len(list(run)))
        done[bucket] = phases.stop
        order += [Task(bucket, chunk, phase) for chunk in range(chunks[bucket]) for phase in phases]
    if skew:
        for at in range(len(order) - 1):
            if order[at].phase > 0 and order[at + 1].phase == 0 and order[at].bucket == order[at + 1].bucket:
                order[at], order[at + 1] = order[at + 1], order[at]
    lists: list[list[Task]] = [[] for _ in range(lanes)]
    lane_of: dict[tuple[int, int], int] = {}
    for task in order:
        lists[lane_of.setdefault((task.bucket, task.chunk), len(lane_of) % lanes)].append(task)
    return lists


class Executor:
    """The lanes of one handle, working on one set of buckets."""

    def __init__(self, plan: Plan, buckets: list[BucketBuffers], lanes: list[Lane]) -> None:
        self.plan, self.buckets, self.lanes = plan, buckets, lanes
        skew = len(lanes) == 1
        self.tasks = task_lists(plan.launch, [len(b.chunks) for b in buckets], len(lanes), skew)
        pieces = {(b.index, number): chunk.exchanges for b in buckets for number, chunk in enumerate(b.chunks)}
        self._tags = dict(zip(pieces, accumulate(pieces.values(), initial=0), strict=False))
        self._arrivals: list[queue.SimpleQueue[tuple[int, Mark]]] = []
        self._running: list[Future[tuple[Meter, Mark]]] = []
        self._at: list[Task | None] = [None] * len(lanes)

    def start(self) -> None:
        """Begin a step."""
        # new queues for every step: what a given-up step left in the old ones is not seen again
        self._arrivals = [queue.SimpleQueue() for _ in self.lanes]
        self._at = [tasks[0] if tasks else None for tasks in self.tasks]
        self._running = [
            lane.submit(partial(self._run, number, arrivals))
            for number, (lane, arrivals) in enumerate(zip(self.lanes, self._arrivals, strict=True))
        ]

    def ready(self, bucket: int) -> None:
        """The bucket's flat buffer holds the gradient of this step."""
        mark = self.lanes[0].link.streams.mark()
        for arrivals in self._arrivals:
            arrivals.put((bucket, mark))

    def give_up(self) -> None:
        """Let the lanes go that wait for buckets, and forget the step."""
        for arrivals in self._arrivals:
            arrivals.put((-1, None))
        self._running = []  # their errors hold the frames they passed

    def break_off(self) -> None:
        """Fail the tasks of all ranks: this one cannot do its own."""
        for lane in self.lanes:
            lane.link.break_off()

    def failure(self) -> TaskFailed | None:
        """The error of a lane that has failed in this step."""
        errors = [future.exception() for future in self._running if future.done()]
        return next((error for error in errors if isinstance(error, TaskFailed)), None)

    def waiting_for(self) -> Task | None:
        """The first task that no lane has done yet."""
        next_ones = [task for task in self._at if task is not None]
        return min(next_ones, key=lambda task: (task.bucket, task.chunk, task.phase)) if next_ones else None

    def finish(self, *others: "Future[Any]") -> list[Meter]:
        """Wait for the step's last task and the other futures. Raises TaskFailed as soon as any lane fails, and what
        another future raises as soon as it does."""
        wait([*self._running, *others], return_when=FIRST_EXCEPTION)
        if failure := self.failure():
            raise failure
        for future in others:
            if future.done():
                future.result()
        results = [future.result() for future in self._running]
        for lane, (_, mark) in zip(self.lanes, results, strict=True):
            lane.link.streams.wait(mark)
        return [meter for meter, _ in results]

    def _run(self, lane: int, arrivals: "queue.SimpleQueue[tuple[int, Mark]]", link: Link) -> tuple[Meter, Mark]:
        meter, marks, tasks = Meter(), {}, self.tasks[lane]
        for task in tasks:
            if task.phase == 0:
                with _telling(task):
                    self.buckets[task.bucket].chunks[task.chunk].post(link, self._tags[task.bucket, task.chunk])
        for task in tasks:
            while task.bucket not in marks:
                bucket, mark = arrivals.get()
                if bucket < 0:
                    raise Abandoned
                marks[bucket] = mark
            self._at[lane] = task
            with _telling(task):
                self.buckets[task.bucket].chunks[task.chunk].run(task.phase, link, meter, marks[task.bucket])
        self._at[lane] = None
        with link.streams.decoding():
            return meter, link.streams.mark()


@contextmanager
def _telling(task: Task) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TaskFailed(task, error) from error
