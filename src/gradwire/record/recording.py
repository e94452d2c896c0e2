"""Records a training loop, for `handle.record`."""

import contextlib
import math
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch

from gradwire.core import Made, make_folder, show, whole
from gradwire.engine import GradientHooks, Observer, Session, tensors_in
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Stats, StepReport, TaskTimes
from gradwire.record.run import FILE, BucketRecord, Decision, Run, StepRecord
from gradwire.record.tensors import Tensors
from gradwire.record.timeline import LaneTask, Moments, measured_timeline
from gradwire.sim import Timeline
from gradwire.transport import LanesObserver

MOST_STEPS = 2000
"""The most recorded steps. Beyond, every second step is dropped, and only every second new step is kept."""
TIMELINE_STEPS = 20
"""Number of last steps from which the timeline shows the one of median length."""
SAVE_EVERY_S = 60.0


class Recording(Observer, LanesObserver):
    """A context that records the training loop inside. Rank 0 writes `run.json` into the folder, for `gradwire report`.

    `handle.record(folder)` makes this context. On other ranks the context does nothing. A recording sends nothing and changes no
    tensor. The file is written every minute and at the end, also after an error; a failure gives one warning. Every `error_steps`
    steps (0: never) the recording encodes some tensors once more to measure the error. Step times exclude this work.

    Only CPUs have a timeline: lanes of an accelerator queue their work and do not see its end.

    Example::

        with handle.record("runs/mine") as recording:
            for batch in loader:
                loss = train_one_step(batch)
                recording.log(loss=loss)
    """

    def __init__(
        self,
        session: Session,
        stats: Callable[[], Stats],
        folder: str | os.PathLike[str],
        error_steps: int,
        decision: Decision | Callable[[], Decision],
    ) -> None:
        whole("error_steps", error_steps, "steps between measurements of errors, 0 for none", error=PlanError)
        model = session.model
        assert model is not None
        self._model, self._name = weakref.ref(model), type(model).__name__
        self._session, self._reducer, self._lanes = session, session.reducer, session.lanes
        self._group, self._stats = session.group, stats
        self._path, self._error_steps, self._decision = Path(folder) / FILE, error_steps, decision
        self._device = session.device
        self._names = list(session.parameters)
        self._steps: list[StepRecord] = []
        self._losses: dict[int, Any] = {}
        self._seen, self._every = 0, 1
        self._number = self._newest = 0
        """`_number` is the step of the last forward, `_newest` the engine's count after the last recorded step."""
        self._tensors = Tensors(session.group)
        self._watched: deque[Watched] = deque(maxlen=TIMELINE_STEPS)
        self._times: list[TaskTimes] = []
        self._times_now: list[TaskTimes] | None = None
        """The lanes' tasks of the current step. They may end during the next step."""
        self._codec_us = 0.0
        self._made = Made.now()
        self._start = self._saved = time.perf_counter()
        self._forward: float | None = None
        """The start of the last forward; None before the first."""
        self._open = False
        """Whether a forward has begun and the exchange of its step has not ended."""
        self._in_backward: float = 0.0
        self._ready: list[tuple[str, float]] = []
        self._ended: float | None = None
        """The end of the last exchange and of the measurements after it."""
        self._finished_s = 0.0
        self._aside_s = 0.0
        """The time of measurements in the last step."""
        self._hooks: list[Any] = []
        self._warned = False
        """Whether a warning has reported that the record cannot be written."""

    def __enter__(self) -> Self:
        model = self._model()
        if self._group.rank == 0 and model is not None:
            make_folder(self._path.parent)
            self._reducer.observers.add(self)
            self._lanes.observe(self)
            parameters = self._session.parameters.values()
            self._gradients = GradientHooks(self, Recording._coming, Recording._became_ready, parameters)
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
            ]
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._gradients.remove()
        self._reducer.observers.remove(self)
        self._lanes.observe(self, on=False)
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
        if self._group.rank != 0:
            return
        if self._forward is None:
            raise StepStateError("loss was logged before the first forward inside record(). Log the loss after a forward.")
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss has shape {tuple(loss.shape)}: log one number a step, such as loss.mean().")
            if loss.is_complex():
                raise ValueError(f"loss is a tensor of {loss.dtype}: log a real number.")
            loss = loss.detach().clone()  # the script may overwrite its memory
        else:
            loss = _number(loss)
        self._losses[self._number] = loss
        if len(self._losses) > 2 * MOST_STEPS:
            kept = {each.step for each in self._steps} | {self._number}
            self._losses = {at: each for at, each in self._losses.items() if at in kept}

    def timeline(self) -> Timeline:
        """Return the measured step of median length among the last steps. The first step counts only if it is the only one.

        Raises StepStateError if there is no measured step.
        """
        if not self._watched:
            raise StepStateError("no step has a timeline. Train a whole step inside record(), on a CPU, and ask on rank 0.")
        watched = [each for each in self._watched if each.step.ended < each.step.forward] or list(self._watched)
        chosen = sorted(watched, key=lambda each: each.step.length_us)[(len(watched) - 1) // 2]
        stats = self._stats()
        sent = stats.wire_bytes, stats.intra_bytes, stats.inter_bytes
        schedule = self._session.plan.schedule.word
        return measured_timeline(chosen.moments(), schedule, self._group.grid.nodes, sent)

    def run(self) -> Run:
        """Return the record so far. Raises StepStateError on ranks other than 0."""
        if self._group.rank != 0:
            raise StepStateError(f"rank {self._group.rank} has no record. Ask on rank 0.")
        exchange, stats = self._session.exchange, self._stats()
        self._go_back()
        self._tensors.use(exchange, self._reducer.step)
        losses: dict[int, float | None] = {step: float(loss) for step, loss in self._losses.items()}
        lost = [step for step, loss in losses.items() if loss is not None and not math.isfinite(loss)]
        losses |= dict.fromkeys(lost)
        note = f"The loss was not finite in {len(lost)} steps, first in step {lost[0]}." if lost else ""
        return Run(
            made=self._made,
            model=self._name,
            device=str(self._device),
            world_size=self._group.world_size,
            nodes=self._group.grid.nodes,
            decision=self._decision() if callable(self._decision) else self._decision,
            plan=exchange.plan,
            steps=tuple(msgspec.structs.replace(step, loss=losses.get(step.step)) for step in self._steps),
            buckets=tuple(
                BucketRecord(**{field: getattr(each, field) for field in BucketRecord.__struct_fields__})
                for each in stats.buckets
            ),
            tensors=self._tensors.records(),
            memory=stats.memory,
            timeline=self.timeline() if self._watched else None,
            notes=(note,) if note else (),
        )

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1  # recomputed in backward
        if module is not self._model() or not torch.is_grad_enabled() or inside:
            return
        undone, self._number = self._go_back(), self._reducer.next_step
        if self._open:
            return
        now = time.perf_counter()
        if not undone and self._forward is not None and self._steps and self._steps[-1].step == self._reducer.step - 1:
            length_us = (now - self._forward - self._aside_s) * 1e6
            self._steps[-1] = msgspec.structs.replace(self._steps[-1], step_us=length_us)
        if now - self._saved >= SAVE_EVERY_S:
            self._save()
            self._saved = time.perf_counter()
        self._times_now = [] if self._device.type == "cpu" else None
        self._tensors.use(self._session.exchange, self._reducer.step)
        if self._error_steps and self._seen % self._error_steps == 0:
            self._tensors.ask()
        self._open, self._ready = True, []
        self._forward = self._in_backward = time.perf_counter()

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is not self._model() or not self._open or not torch.is_grad_enabled():
            return
        self._in_backward = time.perf_counter()
        step, begun = self._seen, list[bool]()

        def begin(gradient: torch.Tensor) -> None:
            if not begun and self._seen == step:
                begun.append(True)
                self._in_backward = time.perf_counter()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def _coming(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._open and self._reducer.synchronise:
            self._tensors.gradient(self._names[index], parameter.grad)

    def _became_ready(self, index: int, parameter: torch.nn.Parameter, accumulated: torch.Tensor | None) -> None:
        if self._open and self._reducer.synchronise:
            self._ready.append((self._names[index], time.perf_counter()))

    def begins(self) -> None:
        if not self._open:
            self._times_now = None  # a step without a forward of the model is not drawn

    def task_times(self) -> list[TaskTimes] | None:
        return self._times_now

    def measured(self, report: StepReport) -> None:
        self._codec_us = report.codec_s * 1e6

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
        step = self._reducer.step - 1
        self._tensors.measure(step)
        if self._times_now is not None:
            ended = self._forward if self._ended is None else self._ended
            before, self._times = self._times, self._times_now
            moments = Moments(ended, self._forward, self._in_backward, self._ready, [], now)
            self._watched.append(Watched(moments, self._aside_s, before, self._times))
        if self._seen % self._every == 0:
            self._steps.append(
                StepRecord(
                    step=step,
                    end_s=now - self._start,
                    step_us=(now - self._forward) * 1e6,
                    exposed_us=exposed_s * 1e6,
                    codec_us=self._codec_us,
                    loss=None,
                )
            )
            self._codec_us = 0.0
        self._seen, self._newest = self._seen + 1, self._reducer.step
        if len(self._steps) > MOST_STEPS:
            del self._steps[1::2]
            self._every *= 2

    def _save(self) -> None:
        """Write the record. A failure gives one warning and no error, because training is more important than the record."""
        try:
            self.run().save(self._path)
        except Exception as problem:
            if not self._warned:
                warnings.warn(
                    f"the record of this run was not written to {self._path}: {type(problem).__name__}: {problem} Training goes "
                    "on. It is tried again every minute and at the end; recording.run().save(PATH) writes it elsewhere.",
                    stacklevel=3,
                )
            self._warned = True

    def _go_back(self) -> bool:
        """Forget steps that the script undid by loading an earlier state. Returns whether there were any."""
        step = self._reducer.step
        if step >= self._newest:
            return False
        self._steps = [each for each in self._steps if each.step < step]
        self._losses = {at: loss for at, loss in self._losses.items() if at < step}
        self._tensors.forget_from(step)
        self._watched.clear()
        self._codec_us, self._open, self._newest = 0.0, False, step
        return True


def _number(loss: object) -> float:
    if not isinstance(loss, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(loss)  # type: ignore[arg-type]
    raise ValueError(f"loss is {show(loss)}: log a real number, or a tensor of one element.")


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
