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
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from gradwire.core import Plan, codes_on_cpu, launch_tasks, tasks_by_lane
from gradwire.exchange.layout import BucketBuffers
from gradwire.transport import Lanes, Link, LinkError, Mark, Meter, Streams

T = TypeVar("T")
_GIVE_UP, _OPEN = -1, -2
"""What a lane may get in place of a bucket that is ready."""
BOTH, REDUCE, GATHER = "both", "reduce", "gather"
"""The phases that a step runs."""


class PhaseTask(NamedTuple):
    """One phase of one piece."""

    bucket: int
    chunk: int
    phase: int


class TaskTimes(NamedTuple):
    """When a lane did a task, in seconds of time.perf_counter."""

    task: PhaseTask
    option: tuple[str, ...]
    """Of the task's bucket."""
    began: float
    ended: float
    codec: list[tuple[float, float]]
    """Encodes and decodes within it, in order."""


class TaskFailed(Exception):
    """Something failed on a lane; carries where."""

    def __init__(self, task: PhaseTask, cause: Exception) -> None:
        super().__init__(f"{task}: {cause}")
        self.task, self.cause = task, cause


class Abandoned(Exception):
    """The step was given up before all buckets were ready."""


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
        self.has_failed = False
        """Whether it is done. A future's `done()` takes a lock."""
        self._left, self._left_before_gate = list(tasks), before_gate
        self._marks: list[list[Mark]] = [[] for _ in tasks]
        self._marks_before_gate: list[Mark] = []
        self._lock = threading.Lock()

    def tell(self, what: int, mark: Mark = None, lanes: Collection[int] | None = None) -> None:
        """Something happened that these lanes may wait for; None: all. It wakes them."""
        for lane, arrivals in enumerate(self.arrivals):
            if lanes is None or lane in lanes:
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

    def lane_done(self, result: "Future[Any]") -> None:
        """A lane did its last task, or failed, or was cut."""
        if result.exception() is not None:
            self.fail()

    def fail(self) -> None:
        """A lane failed or was let go."""
        with self._lock:
            self.has_failed = True
            # first `failed`: whoever is woken by another one asks it who is to blame
            waited_for: list[Future[Any]] = [self.failed, *self.done, self.at_gate]
            for future in waited_for:
                if not future.done():
                    future.set_result(None)


class _StepTasks(NamedTuple):
    """The tasks of a step that runs both phases, or one alone."""

    lists: list[list[PhaseTask]]
    """Of each lane."""
    counts: list[int]
    """How many each bucket has."""
    before_gate: int
    """How many come before the gate."""


class Executor:
    """Runs one set of buckets on the lanes of a group."""

    def __init__(self, plan: Plan, buckets: list[BucketBuffers], lanes: Lanes) -> None:
        self.plan, self.buckets, self.lanes = plan, buckets, lanes
        count = len(lanes.data)
        order = launch_tasks(plan.launch, [len(b.chunks) for b in buckets], count == 1, plan.gate)
        offloaded = [index for index, bucket in enumerate(plan.buckets) if codes_on_cpu(bucket.option)]
        by_lane = tasks_by_lane(order, count - lanes.offload, offloaded, lanes.offload)
        self.tasks = [[PhaseTask(*task) for task in tasks] for tasks in by_lane]
        self._lanes_of = [
            {lane for lane, tasks in enumerate(self.tasks) for task in tasks if task.bucket == bucket.index}
            for bucket in buckets
        ]
        """By bucket, the lanes that have tasks of it."""
        self._phases_before_gate = Counter(bucket for bucket, _ in plan.launch[: plan.gate])
        pieces = {(b.index, number): chunk.exchanges for b in buckets for number, chunk in enumerate(b.chunks)}
        self._tags = dict(zip(pieces, accumulate(pieces.values(), initial=0), strict=False))
        self._progress = _Progress(0, ())
        self._running: list[Future[tuple[Meter, Mark]]] = []
        self._at: list[PhaseTask | None] = [None] * count
        self._held: list[int] = []
        """Buckets that are ready and that the lanes do not get yet."""
        self._awaited = len(buckets)
        """How many buckets the step has."""
        self._parts: dict[tuple[str, Sequence[int]], _StepTasks] = {}

    @property
    def _streams(self) -> Streams:
        return self.lanes.data[0].link.streams

    def start(self, phases: str = BOTH, buckets: Sequence[int] | None = None) -> None:
        """Begin a step, or the reduce or the gather phase of one alone, where all buckets have the two. `buckets`: of these
        alone."""
        chosen = tuple(range(len(self.buckets))) if buckets is None else tuple(buckets)
        lists, counts, before_gate = self._of_part(phases, chosen)
        self._awaited = len(chosen)
        self._progress = progress = _Progress(len(lists), counts, before_gate)
        self._held, self.lanes.running = [], weakref.ref(self)
        self._at = [tasks[0] if tasks else None for tasks in lists]
        self._running = [
            lane.submit(partial(self._run, number, tasks, progress))
            for number, (lane, tasks) in enumerate(zip(self.lanes.data, lists, strict=True))
        ]
        for future in self._running:
            future.add_done_callback(progress.lane_done)

    def _of_part(self, phases: str, buckets: tuple[int, ...]) -> "_StepTasks":
        """What a step that runs these phases of these buckets does."""
        if (phases, buckets) in self._parts:
            return self._parts[phases, buckets]
        of_buckets = [[task for task in tasks if task.bucket in buckets] for tasks in self.tasks]
        lists = [[task for task in tasks if self._is_of(task, phases)] for tasks in of_buckets]
        counted = Counter(task.bucket for tasks in lists for task in tasks)
        before_gate = sum(not self._is_behind(task) for tasks in lists for task in tasks)
        counts = [counted[index] for index in range(len(self.buckets))]
        made = self._parts[phases, buckets] = _StepTasks(lists, counts, before_gate)
        return made

    def _is_of(self, task: PhaseTask, part: str) -> bool:
        if part == BOTH:
            return True
        bucket = self.plan.buckets[task.bucket]
        gathers = task.phase >= len(bucket.link_tasks) - bucket.gathers
        return gathers == (part == GATHER)

    def _is_behind(self, task: PhaseTask) -> bool:
        """Whether the task waits for the gate."""
        return task.phase >= self._phases_before_gate[task.bucket]

    def ready(self, bucket: int) -> None:
        """The bucket's flat buffer holds the gradient of this step."""
        self._held.append(bucket)
        if self.lanes.hold and len(self._held) < self._awaited:
            return
        mark = self._streams.mark()
        for each in self._held:
            self._progress.tell(each, mark, self._lanes_of[each])
        self._held = []

    @property
    def last_task(self) -> "Future[list[Mark] | None] | None":
        """Of the step that runs, done with its last task: with None where a lane failed. None where tasks wait for the gate,
        and where no step runs."""
        beside = self.plan.gate < len(self.plan.launch)
        return None if beside or not self._running else self._progress.at_gate

    def open_gate(self) -> None:
        """Let the tasks behind the gate run, each lane's after its own before it, and after what the caller has queued."""
        self._progress.tell(_OPEN, self._streams.mark())

    def drain(self) -> None:
        """Wait for the lanes' last task or failure."""
        wait(self._running)

    def give_up(self) -> None:
        """Let the lanes go that wait for buckets or before the gate, and forget the step."""
        self._progress.tell(_GIVE_UP)
        self._progress, self._running = _Progress(0, ()), []  # their errors hold the frames they passed

    def failure(self) -> TaskFailed | None:
        """The error of a lane that has failed in this step."""
        if not self._progress.has_failed:
            return None
        errors = [future.exception() if future.done() else None for future in self._running]
        cut = [
            TaskFailed(at or PhaseTask(0, 0, 0), error)
            for at, error in zip(self._at, errors, strict=False)
            if isinstance(error, LinkError)
        ]
        return next((error for error in errors if isinstance(error, TaskFailed)), cut[0] if cut else None)

    def waiting_for(self) -> str:
        """The first task that no lane has done yet, in words; '' where all are done."""
        next_ones = [task for task in self._at if task is not None]
        return self.in_words(min(next_ones)) if next_ones else ""

    def in_words(self, task: PhaseTask) -> str:
        """The task, its bucket and its tensors."""
        bucket = self.plan.buckets[task.bucket]
        names = bucket.tensors[0] if len(bucket.tensors) == 1 else f"{bucket.tensors[0]} .. {bucket.tensors[-1]}"
        return f"bucket {task.bucket} ({names}), chunk {task.chunk}, {bucket.link_tasks[task.phase]}"

    def _words(self, task: PhaseTask) -> tuple[object, ...]:
        """The task for the flight recorder, short."""
        return "bucket", task.bucket, "chunk", task.chunk, self.plan.buckets[task.bucket].link_tasks[task.phase]

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
            self._streams.wait(mark)

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
        if self._progress.failed.done():
            raise self._lanes_failure()
        for future in others:
            if future.done():
                future.result()
        results = [future.result() for future in self._running]
        for lane, (_, mark) in zip(self.lanes.data, results, strict=True):
            lane.link.streams.wait(mark)
        return [meter for meter, _ in results]

    def _run(self, lane: int, tasks: Sequence[PhaseTask], progress: _Progress, link: Link) -> tuple[Meter, Mark]:
        try:
            return self._run_tasks(lane, tasks, progress, link)
        except (TaskFailed, Abandoned):
            progress.fail()
            raise
        except Exception as error:  # between two tasks
            progress.fail()
            raise TaskFailed(self._at[lane] or PhaseTask(0, 0, 0), error) from error

    def _run_tasks(self, lane: int, tasks: Sequence[PhaseTask], progress: _Progress, link: Link) -> tuple[Meter, Mark]:
        times = self.lanes.times
        meter = Meter(spans=None if times is None else [])
        marks: dict[int, Mark] = {}
        for (bucket, chunk), phases in _phases_by_piece(tasks).items():
            try:
                self.buckets[bucket].chunks[chunk].post(link, self._tags[bucket, chunk], phases)
            except Exception as error:
                raise TaskFailed(PhaseTask(bucket, chunk, phases[0]), error) from error
        for task in tasks:
            behind = self._is_behind(task)
            for needed in (task.bucket, _OPEN) if behind else (task.bucket,):
                while needed not in marks:
                    what, mark = progress.arrivals[lane].get()
                    if what == _GIVE_UP:
                        raise Abandoned
                    marks[what] = mark
            self._at[lane] = task
            began, ready = time.perf_counter(), marks[_OPEN if behind else task.bucket]
            doing = self.lanes.flight.doing(*self._words(task))
            try:
                self.buckets[task.bucket].chunks[task.chunk].run(task.phase, link, meter, ready)
            except Exception as error:
                raise TaskFailed(task, error) from error
            doing.done()
            ended = time.perf_counter()
            meter.task_seconds += ended - began
            if times is not None:
                option = self.plan.buckets[task.bucket].option
                times.append(TaskTimes(task, option, began, ended, meter.take_spans()))
            with link.streams.decoding():
                progress.task_done(task.bucket, behind, link.streams.mark())
        self._at[lane] = None
        with link.streams.decoding():
            return meter, link.streams.mark()


def _phases_by_piece(tasks: Sequence[PhaseTask]) -> dict[tuple[int, int], list[int]]:
    phases: dict[tuple[int, int], list[int]] = {}
    for task in tasks:
        phases.setdefault((task.bucket, task.chunk), []).append(task.phase)
    return phases
