"""Records a training loop, for `handle.record`."""

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, Self

import torch

from gradwire.core import Made, make_folder, whole
from gradwire.engine import Observer, Observers, TrainedJob, ValueWatcher, tensors_in
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import ExchangeStats, StepReport, TaskTimes
from gradwire.plan import Policy
from gradwire.record.kept import KeptSteps
from gradwire.record.run import FILE, BucketRecord, Decision, Run, StepRecord
from gradwire.record.tensors import Tensors
from gradwire.record.timeline import LaneTask, Moments, Pass, measured_timeline
from gradwire.sim import Timeline
from gradwire.transport import LanesObserver

TIMELINE_STEPS = 20
"""Number of last steps from which the timeline shows the one of median length."""
SAVE_EVERY_S = 60.0
_BYTES = ("numel", "chunks", "gradient_bytes", "wire_bytes", "intra_bytes", "inter_bytes")


class RecordedJob(TrainedJob, Protocol):
    """A job whose steps can be recorded."""

    @property
    def model(self) -> torch.nn.Module | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def records(self) -> bool:
        """Whether this rank writes the record."""
        ...

    @property
    def driver(self) -> Any:
        """The driver, of which `recorded()` and `measurements()` are called; None if the script chose the plan."""
        ...

    @property
    def policy(self) -> Policy | None: ...
    @property
    def observers(self) -> Observers: ...
    @property
    def running(self) -> bool:
        """Whether there is a plan and an exchange. Before the first backward of a hook there is none."""
        ...

    @property
    def exchange(self) -> object:
        """The exchange that runs; another object after each change of the plan or of its specs."""
        ...

    @property
    def next_step(self) -> int:
        """The number of the step of the next forward."""
        ...

    @property
    def synchronises(self) -> bool:
        """Whether the next backward sends gradients."""
        ...

    @property
    def predicted_us(self) -> Mapping[str, float]:
        """The predicted time of the exchange of each tensor that is exchanged alone."""
        ...

    def stats(self) -> ExchangeStats: ...

    def watch_values(self, watcher: ValueWatcher) -> Callable[[], None]:
        """Call the watcher for each gradient as long as it lives. Returns what ends this."""
        ...

    def watch_tasks(self, observer: LanesObserver) -> Callable[[], None]:
        """Give the observer the times of the lanes' tasks. Returns what ends this."""
        ...


class Recording(Observer, LanesObserver):
    """A context that records the training loop inside. Rank 0 writes `run.json` into the folder, for `gradwire report`.

    `record(folder)` of a handle, of a `gw.DDPState` and of FSDP2's exchanges makes this context. On other ranks the context does
    nothing. A recording sends nothing and changes no tensor. The file is written every minute and at the end, also after an
    error; a failure gives one warning. Every `error_steps` steps (0: never) the recording encodes some tensors once more to
    measure the error. Step times exclude this work.

    Only CPUs have a timeline: lanes of an accelerator queue their work and do not see its end.

    Under plan="auto" the folder also gets the measurements of the last decision: `profile.json`, `cluster.json`, `costs.json`.
    The report predicts the step from these files.

    Example::

        with handle.record("runs/mine") as recording:
            for batch in loader:
                loss = train_one_step(batch)
                recording.log(loss=loss)
    """

    def __init__(
        self, job: RecordedJob, folder: str | os.PathLike[str], error_steps: int, decision: Decision | None = None
    ) -> None:
        """decision: the origin of the plan, if the caller knows more than gradwire does."""
        whole("error_steps", error_steps, "steps between measurements of errors, 0 for none", error=PlanError)
        model = job.model
        assert model is not None
        self._model, self._job = weakref.ref(model), job
        self._path, self._error_steps, self._decision = Path(folder) / FILE, error_steps, decision
        self._cpu = job.device.type == "cpu"
        self._names = [tensor.name for tensor in job.tensors]
        self._kept = KeptSteps()
        self._number = self._newest = 0
        """`_number` is the step of the last forward, `_newest` the job's count after the last recorded step."""
        self._tensors = Tensors(job.group)
        self._watched: deque[Watched] = deque(maxlen=TIMELINE_STEPS)
        self._times: list[TaskTimes] = []
        self._times_now: list[TaskTimes] | None = None
        """The lanes' tasks of the current step. They may end during the next step."""
        self._codec_us = 0.0
        self._made = Made.now()
        self._start = self._saved = time.perf_counter()
        self._forward: float | None = None
        """The start of the last step's first forward; None before the first step."""
        self._open = False
        """Whether a forward has begun and the exchange of its step has not ended."""
        self._looked = False
        """Whether the plan of this step is noted."""
        self._earlier: list[Pass] = []
        """The forwards and backwards of this step before the last forward: of local steps, or of gradients that add up."""
        self._local_steps = 0
        """The local steps since the step's first forward. Where gradients add up they are fewer than forwards."""
        self._last_forward = self._in_backward = 0.0
        self._ready: list[tuple[str, float]] = []
        self._resumed: dict[str, float] = {}
        self._ended: float | None = None
        """The end of the last exchange and of the measurements after it."""
        self._finished_s = 0.0
        self._aside_s = 0.0
        """The time of measurements in the last step."""
        self._ends: list[Callable[[], None]] = []
        self._warned = False
        """Whether a warning has reported that the record cannot be written."""

    def __enter__(self) -> Self:
        model = self._model()
        if self._job.records and model is not None:
            self._make_folder()
            self._job.observers.add(self)
            self._ends = [
                lambda: self._job.observers.remove(self),
                self._job.watch_tasks(self),
                self._job.watch_values(self),
                model.register_forward_pre_hook(self._before_forward).remove,
                model.register_forward_hook(self._after_forward).remove,
            ]
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._ends:
            return
        for end in self._ends:
            end()
        self._ends = []
        if self._forward is None and error is None:
            warnings.warn(
                f"nothing was recorded in {self._path.parent}: the model was not called inside record(). A step begins with a "
                "call of the model itself, not of its parts.",
                stacklevel=2,
            )
        self._save()

    def log(self, loss: Any) -> None:
        """Log this rank's loss of the current step: a real number or a tensor of one element. Does not synchronise.

        Raises StepStateError before the first step, ValueError for any other value.
        """
        if not self._job.records:
            return
        if self._forward is None:
            raise StepStateError("loss was logged before the first forward inside record(). Log the loss after a forward.")
        self._kept.log(self._number, loss)

    def timeline(self) -> Timeline:
        """Return the measured step of median length among the last steps. The first step counts only if it is the only one.

        Raises StepStateError if there is no measured step.
        """
        if self._watched:
            self._note_plan()
        if not self._watched:
            raise StepStateError("no step has a timeline. Train a whole step inside record(), on a CPU, and ask on rank 0.")
        watched = [each for each in self._watched if each.step.ended < each.step.forward] or list(self._watched)
        chosen = sorted(watched, key=lambda each: each.step.length_us)[(len(watched) - 1) // 2]
        stats = self._job.stats()
        sent = stats.wire_bytes, stats.intra_bytes, stats.inter_bytes
        schedule = self._job.plan.schedule.word
        return measured_timeline(chosen.moments(), schedule, self._job.group.grid.nodes, sent)

    def run(self) -> Run:
        """Return the record so far. Raises StepStateError on ranks other than 0."""
        job = self._job
        if not job.records:
            raise StepStateError(f"rank {job.group.rank} has no record. Ask on rank 0.")
        if not job.running:
            raise StepStateError("no step ran yet: there is no plan to record. Train a whole step inside record().")
        stats = job.stats()
        self._go_back()
        self._note_plan()
        times, predicted = self._times_of_buckets(), job.predicted_us
        return Run(
            made=self._made,
            model=job.model_name,
            device=str(job.device),
            world_size=job.group.world_size,
            nodes=job.group.grid.nodes,
            decision=self._decided(),
            plan=job.plan,
            steps=self._kept.records(),
            buckets=tuple(
                BucketRecord(
                    **{field: getattr(each, field) for field in _BYTES},
                    exchange_us=times.get(at),
                    predicted_us=predicted.get(each.tensors[0]) if len(each.tensors) == 1 else None,
                )
                for at, each in enumerate(stats.buckets)
            ),
            tensors=self._tensors.records(),
            memory=stats.memory,
            timeline=self.timeline() if self._watched else None,
            notes=self._kept.notes(),
        )

    def _decided(self) -> Decision:
        if self._decision is not None:
            return self._decision
        if self._job.driver is not None:
            return self._job.driver.recorded()  # type: ignore[no-any-return]
        policy = self._job.policy
        return Decision(by="a plan that was given" if policy is None else f"a policy with {policy.default!r} as default")

    def _times_of_buckets(self) -> dict[int, float]:
        """The median time of each bucket's exchange, from the begin of its first task to the end of its last one."""
        spans: dict[int, list[float]] = {}
        for watched in self._watched:
            moments: dict[int, list[float]] = {}
            for each in watched.own:
                moments.setdefault(each.task.bucket, []).extend((each.began, each.ended))
            for bucket, found in moments.items():
                spans.setdefault(bucket, []).append(1e6 * (max(found) - min(found)))
        return {bucket: median(found) for bucket, found in spans.items()}

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1  # recomputed in backward
        if module is not self._model() or not torch.is_grad_enabled() or inside:
            return
        undone, self._number = self._go_back(), self._job.next_step
        if self._open:
            self._earlier.append(self._pass([("", moment) for _, moment in self._ready[-1:]]))
            self._begin_pass()
            return
        now = time.perf_counter()
        if not undone and self._forward is not None:
            self._kept.lasted(self._job.step - 1, (now - self._forward - self._aside_s) * 1e6)
        if now - self._saved >= SAVE_EVERY_S:
            self._save()
            self._saved = time.perf_counter()
        self._times_now = [] if self._cpu else None
        self._open, self._looked, self._earlier, self._local_steps = True, False, [], 0
        if self._job.running:
            self._look()
        self._begin_pass()
        self._forward = self._last_forward

    def _begin_pass(self) -> None:
        self._ready, self._resumed = [], {}
        self._last_forward = self._in_backward = time.perf_counter()

    def _pass(self, ready: list[tuple[str, float]]) -> Pass:
        return Pass(self._last_forward, self._in_backward, ready, self._resumed)

    def _note_plan(self) -> None:
        job = self._job
        if self._tensors.use(job.exchange, job.plan, job.tensors, job.step):
            self._watched.clear()  # their tasks have the numbers of other buckets
            self._times = []

    def _look(self) -> None:
        """Note the plan of the step, and choose tensors for a measurement of errors."""
        self._looked = True
        self._note_plan()
        if self._error_steps and self._kept.seen % self._error_steps == 0:
            self._tensors.ask()

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is not self._model() or not self._open or not torch.is_grad_enabled():
            return
        self._in_backward = time.perf_counter()
        step, number, begun = self._kept.seen, len(self._earlier), list[bool]()

        def begin(gradient: torch.Tensor) -> None:
            if not begun and (self._kept.seen, len(self._earlier)) == (step, number):
                begun.append(True)
                self._in_backward = time.perf_counter()

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # on a parameter the hook would stay
                tensor.register_hook(begin)

    def coming(self, index: int, gradient: torch.Tensor | None) -> None:
        if self._open and self._job.synchronises:
            self._tensors.gradient(self._names[index], gradient)

    def ready(self, index: int) -> None:
        if self._open:
            self._ready.append((self._names[index], time.perf_counter()))

    def resumed(self, index: int) -> None:
        self._resumed[self._names[index]] = time.perf_counter()

    def begins(self) -> None:
        if not self._open:
            self._times_now = None  # a step without a forward of the model is not drawn
        elif not self._looked:
            self._look()

    def task_times(self) -> list[TaskTimes] | None:
        return self._times_now

    def measured(self, report: StepReport) -> None:
        self._codec_us = report.codec_s * 1e6

    def local_step(self) -> None:
        self._local_steps += 1

    def finished(self, exposed_s: float) -> None:
        self._finished_s = now = time.perf_counter()
        if self._open and self._forward is not None:
            self._keep(exposed_s, now)

    def idle(self) -> None:
        self._open = False
        self._ended = time.perf_counter()
        self._aside_s = self._ended - self._finished_s

    def _keep(self, exposed_s: float, now: float) -> None:
        assert self._forward is not None
        step, schedule = self._job.step - 1, self._job.plan.schedule
        local_steps, rank = None, self._job.group.rank
        if schedule.sends_weights:  # fewer were seen where the recording began between two exchanges
            made = schedule.begins_after(step, rank) - schedule.begins_after(step - 1, rank)
            local_steps = max(1, min(made, self._local_steps))
        self._tensors.measure(step)
        if self._times_now is not None:
            ended = self._forward if self._ended is None else self._ended
            before, self._times = self._times, self._times_now
            moments = Moments(ended, [*self._earlier, self._pass(self._ready)], [], now, local_steps or 1)
            self._watched.append(Watched(moments, self._aside_s, before, self._times))
        kept = StepRecord(
            step=step,
            end_s=now - self._start,
            step_us=(now - self._forward) * 1e6,
            exposed_us=exposed_s * 1e6,
            codec_us=self._codec_us,
            loss=None,
            local_steps=local_steps,
        )
        if self._kept.add(kept):
            self._codec_us = 0.0
        self._newest = self._job.step

    def _make_folder(self) -> None:
        try:
            make_folder(self._path.parent)
        except (OSError, ValueError) as problem:  # ValueError: a path with a NUL
            self._warn(problem)

    def _save(self) -> None:
        """Write the record. A failure gives one warning and no error, because training is more important than the record."""
        try:
            self.run().save(self._path)
            measured = self._job.driver.measurements() if self._job.driver is not None else None
            for name, document in (measured or {}).items():
                document.save(self._path.with_name(f"{name}.json"))
        except Exception as problem:
            self._warn(problem)

    def _warn(self, problem: Exception) -> None:
        """Warn once that the record cannot be written. An error would end training, and on rank 0 alone."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the record of this run was not written to {self._path}: {type(problem).__name__}: {problem} Training goes "
                "on. It is tried again every minute and at the end; recording.run().save(PATH) writes it elsewhere.",
                stacklevel=4,
            )

    def _go_back(self) -> bool:
        """Forget steps that the script undid by loading an earlier state. Returns whether there were any."""
        step = self._job.step
        if step >= self._newest:
            return False
        self._kept.forget_from(step)
        self._tensors.forget_from(step)
        self._watched.clear()
        self._codec_us, self._open, self._newest = 0.0, False, step
        return True


class Watched(NamedTuple):
    """The moments of one step, without tasks, and the lanes' tasks of this step and the one before. Lanes may add tasks."""

    step: Moments
    aside_s: float
    """The time of measurements before `step.ended`. Exchanges that began meanwhile are drawn from `step.ended` on."""
    before: list[TaskTimes]
    own: list[TaskTimes]

    def moments(self) -> Moments:
        """Return the step's moments with all tasks that ran during the step, including tasks of the step before."""

        def shown(moment: float) -> float:
            return max(moment, self.step.ended)

        tasks = [
            LaneTask(
                *(each.task.bucket, each.task.chunk, each.task.phase, each.option),
                *(shown(each.began), shown(each.ended)),
                [(shown(began), shown(ended)) for began, ended in each.codec],
                step,
            )
            for times, step in ((self.before, -1), (self.own, 0))
            for each in list(times)
            if self.step.ended - self.aside_s < each.ended and each.began <= self.step.finished
        ]
        return self.step._replace(tasks=tasks)
