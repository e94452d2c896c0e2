"""Runs the link tasks of a plan, in its launch order, on lanes.

A step of the executor:
1. `start` gives every lane its list of tasks. Lists are static: cut from the launch order once, the same on all ranks.
2. `ready(bucket)` is called as gradients become ready. A lane does its tasks strictly in order and waits for the bucket
   of the next one; it never takes another because it happens to be ready.
3. Tasks behind the gate, a position in the launch order, wait until `open_gate`. Plans without gathers that run beside the
   next forward have none behind it.
4. `finish` opens the gate, waits for all lanes, and for what else the step must wait for, and returns what the lanes
   measured. Before that, `await_bucket` waits for one bucket, and `await_result` for anything else beside the lanes. What
   fails on a lane reaches whoever waits.

Pieces (chunks of buckets) go round the lanes. On CPU a lane blocks in its collectives, so two lanes keep the wire busy
while one encodes. On CUDA nothing blocks, one lane submits everything, and the gather of a piece is put behind the
reduce of the bucket's next, so that the codec of one runs while the other is on the wire.
"""

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

from gradwire.collectives import Lane, Link, Meter
from gradwire.collectives.streams import Mark
from gradwire.core.plan import Plan
from gradwire.engine.layout import BucketBuffers

__all__ = ["Executor", "Task", "TaskFailed", "TaskTimes", "task_lists"]

T = TypeVar("T")
_GIVE_UP, _OPEN = -1, -2
"""What a lane may get in place of a bucket that is ready."""


@dataclass(frozen=True)
class Task:
    """One phase of one piece."""

    bucket: int
    chunk: int
    phase: int


class TaskTimes(NamedTuple):
    """When a lane did a task, in seconds of time.perf_counter."""

    task: Task
    option: tuple[str, ...]
    """Of the task's bucket."""
    began: float
    ended: float
    codec: list[tuple[float, float]]
    """Encodes and decodes within it, in order."""


class TaskFailed(Exception):
    """Something failed on a lane; carries where."""

    def __init__(self, task: Task, cause: Exception) -> None:
        super().__init__(f"{task}: {cause}")
        self.task, self.cause = task, cause


class Abandoned(Exception):
    """The step was given up before all buckets were ready."""


def task_lists(
    launch: Sequence[tuple[int, str]], chunks: Sequence[int], lanes: int, skew: bool, gate: int | None = None
) -> list[list[Task]]:
    """The tasks of each lane. `chunks[b]` is the number of pieces of bucket b, `gate` a position in the launch order.

    Launches of one bucket that follow each other on the same side of the gate run piece by piece; with skew the last phase
    of a piece comes after the first phase of the bucket's next.

    >>> task_lists([(0, "alltoall"), (0, "allgather")], chunks=[2], lanes=1, skew=False)[0][1]
    Task(bucket=0, chunk=0, phase=1)
    >>> task_lists([(0, "alltoall"), (0, "allgather")], chunks=[2], lanes=1, skew=False, gate=1)[0][1]
    Task(bucket=0, chunk=1, phase=0)
    """
    done: dict[int, int] = defaultdict(int)
    order: list[Task] = []
    for part in (launch[:gate], launch[gate:] if gate is not None else ()):
        for bucket, run in groupby(part, key=lambda entry: entry[0]):
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


class _Progress:
    """How far one step is. A new one for every step: what a given-up step left in the old one is not seen again."""

    def __init__(self, lanes: int, tasks: Sequence[int], before_gate: int = 0) -> None:
        """`tasks[b]` is the number of tasks of bucket b, `before_gate` that of tasks before the gate."""
        self.arrivals: list[queue.SimpleQueue[tuple[int, Mark]]] = [queue.SimpleQueue() for _ in range(lanes)]
        self.done: list[Future[list[Mark] | None]] = [Future() for _ in tasks]
        """Of each bucket: where its tasks are in the streams; None when a lane failed. The error is the lane's alone: it holds
        the frames it passed, and through them all this."""
        self.at_gate: Future[list[Mark] | None] = Future()
        """Of the tasks before the gate, as `done` is of a bucket's."""
        self.failed: Future[None] = Future()
        """Never done unless a lane fails."""
        self._left, self._left_before_gate = list(tasks), before_gate
        self._marks: list[list[Mark]] = [[] for _ in tasks]
        self._marks_before_gate: list[Mark] = []
        self._lock = threading.Lock()

    def tell(self, what: int, mark: Mark = None) -> None:
        """Something happened that lanes may wait for."""
        for arrivals in self.arrivals:
            arrivals.put((what, mark))

    def task_done(self, bucket: int, behind: bool, mark: Mark) -> None:
        with self._lock:
            if not behind:
                self._marks_before_gate.append(mark)
                self._left_before_gate -= 1
                if not self._left_before_gate and not self.at_gate.done():
                    self.at_gate.set_result(self._marks_before_gate)
            self._marks[bucket].append(mark)
            self._left[bucket] -= 1
            if not self._left[bucket] and not self.done[bucket].done():
                self.done[bucket].set_result(self._marks[bucket])

    def fail(self) -> None:
        """A lane failed or was let go."""
        with self._lock:
            waited_for: list[Future[Any]] = [*self.done, self.at_gate, self.failed]
            for future in waited_for:
                if not future.done():
                    future.set_result(None)


class Executor:
    """The lanes of one handle, working on one set of buckets."""

    def __init__(self, plan: Plan, buckets: list[BucketBuffers], lanes: list[Lane]) -> None:
        self.plan, self.buckets, self.lanes = plan, buckets, lanes
        skew = len(lanes) == 1
        self.tasks = task_lists(plan.launch, [len(b.chunks) for b in buckets], len(lanes), skew, plan.gate)
        self._phases_before_gate = Counter(bucket for bucket, _ in plan.launch[: plan.gate])
        counted = Counter(task.bucket for tasks in self.tasks for task in tasks)
        self._counts = [counted[index] for index in range(len(buckets))]
        each = ((task.phase, self._phases_before_gate[task.bucket]) for tasks in self.tasks for task in tasks)
        self._before_gate = sum(phase < border for phase, border in each)
        pieces = {(b.index, number): chunk.exchanges for b in buckets for number, chunk in enumerate(b.chunks)}
        self._tags = dict(zip(pieces, accumulate(pieces.values(), initial=0), strict=False))
        self._progress = _Progress(0, ())
        self._running: list[Future[tuple[Meter, Mark]]] = []
        self._at: list[Task | None] = [None] * len(lanes)
        self.hold = False
        """For measurements: hand the lanes nothing before all buckets are ready, so that nothing is encoded or sent during
        backward. Sums are as ever."""
        self._held: list[int] = []
        self.times: list[TaskTimes] | None = None
        """For recordings: lanes append what they did, from the next step on. None: nothing is kept."""

    def start(self) -> None:
        """Begin a step."""
        self._progress = progress = _Progress(len(self.lanes), self._counts, self._before_gate)
        self._held = []
        self._at = [tasks[0] if tasks else None for tasks in self.tasks]
        self._running = [lane.submit(partial(self._run, number, progress)) for number, lane in enumerate(self.lanes)]

    def ready(self, bucket: int) -> None:
        """The bucket's flat buffer holds the gradient of this step."""
        self._held.append(bucket)
        if self.hold and len(self._held) < len(self.buckets):
            return
        mark = self.lanes[0].link.streams.mark()
        for each in self._held:
            self._progress.tell(each, mark)
        self._held = []

    def open_gate(self) -> None:
        """Let the tasks behind the gate run, each lane's after its own before it, and after what the caller has queued."""
        self._progress.tell(_OPEN, self.lanes[0].link.streams.mark())

    def drain(self) -> None:
        """Wait for the lanes' last task or failure."""
        wait(self._running)

    def give_up(self) -> None:
        """Let the lanes go that wait for buckets or before the gate, and forget the step."""
        self._progress.tell(_GIVE_UP)
        self._progress, self._running = _Progress(0, ()), []  # their errors hold the frames they passed

    def break_off(self) -> None:
        """Fail the tasks of all ranks: this one cannot do its own."""
        for lane in self.lanes:
            lane.link.break_off()

    def failure(self) -> TaskFailed | None:
        """The error of a lane that has failed in this step."""
        if not self._progress.failed.done():
            return None
        errors = [future.exception() for future in self._running if future.done()]
        return next((error for error in errors if isinstance(error, TaskFailed)), None)

    def waiting_for(self) -> Task | None:
        """The first task that no lane has done yet."""
        next_ones = [task for task in self._at if task is not None]
        return min(next_ones, key=lambda task: (task.bucket, task.chunk, task.phase)) if next_ones else None

    def await_bucket(self, bucket: int) -> None:
        """Wait until all tasks of the bucket are done. Raises TaskFailed if a lane failed before that."""
        self._await(self._progress.done[bucket])

    def await_gate(self) -> None:
        """Wait until all tasks before the gate are done. Raises TaskFailed if a lane failed before that."""
        self._await(self._progress.at_gate)

    def _await(self, tasks: "Future[list[Mark] | None]") -> None:
        marks = tasks.result()
        if marks is None:
            raise self._lanes_failure()
        for mark in marks:
            self.lanes[0].link.streams.wait(mark)

    def await_result(self, other: "Future[T]") -> T:
        """Wait for something else while lanes go on. Raises TaskFailed as soon as any lane fails."""
        either: list[Future[Any]] = [other, self._progress.failed]
        wait(either, return_when=FIRST_COMPLETED)
        if self._progress.failed.done():
            raise self._lanes_failure()
        return other.result()

    def _lanes_failure(self) -> Exception:
        wait(self._running, return_when=FIRST_EXCEPTION)
        return self.failure() or Abandoned()

    def finish(self, *others: "Future[Any]") -> list[Meter]:
        """Open the gate and wait for the step's last task and the other futures. Raises TaskFailed as soon as any lane
        fails, and what another future raises as soon as it does."""
        self.open_gate()
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

    def _run(self, lane: int, progress: _Progress, link: Link) -> tuple[Meter, Mark]:
        try:
            return self._run_tasks(lane, progress, link)
        except BaseException:
            progress.fail()
            raise

    def _run_tasks(self, lane: int, progress: _Progress, link: Link) -> tuple[Meter, Mark]:
        tasks, times = self.tasks[lane], self.times
        meter = Meter(spans=None if times is None else [])
        marks: dict[int, Mark] = {}
        for task in tasks:
            if task.phase == 0:
                with _telling(task):
                    self.buckets[task.bucket].chunks[task.chunk].post(link, self._tags[task.bucket, task.chunk])
        for task in tasks:
            behind = task.phase >= self._phases_before_gate[task.bucket]
            for needed in (task.bucket, _OPEN) if behind else (task.bucket,):
                while needed not in marks:
                    what, mark = progress.arrivals[lane].get()
                    if what == _GIVE_UP:
                        raise Abandoned
                    marks[what] = mark
            self._at[lane] = task
            began = time.perf_counter()
            with _telling(task), meter.task():
                ready = marks[_OPEN if behind else task.bucket]
                self.buckets[task.bucket].chunks[task.chunk].run(task.phase, link, meter, ready)
            if times is not None:
                option = self.plan.buckets[task.bucket].option
                times.append(TaskTimes(task, option, began, time.perf_counter(), meter.take_spans()))
            with link.streams.decoding():
                progress.task_done(task.bucket, behind, link.streams.mark())
        self._at[lane] = None
        with link.streams.decoding():
            return meter, link.streams.mark()


@contextmanager
def _telling(task: Task) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TaskFailed(task, error) from error
