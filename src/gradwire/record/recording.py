"""Recording inside an ordinary training loop: what `handle.record` returns."""

import contextlib
import math
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch

from gradwire.core.checks import show, whole
from gradwire.core.files import make_folder
from gradwire.core.made import Made
from gradwire.engine.observers import Observer
from gradwire.engine.seams.hooks import GradientHooks, tensors_in
from gradwire.engine.session import Session
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange.executor import TaskTimes
from gradwire.exchange.stats import Stats, StepReport
from gradwire.record.run import FILE, BucketRecord, Decision, Run, StepRecord
from gradwire.record.tensors import Tensors
from gradwire.record.timeline import LaneTask, Moments, Sent, measured_timeline
from gradwire.sim.timeline import Timeline

MOST_STEPS = 2000
"""Steps that are kept; then every second one goes, and only every second one comes from then on."""
TIMELINE_STEPS = 20
"""Of so many last steps the one of median length is shown."""
SAVE_EVERY_S = 60.0


class Recording(Observer):
    """Records the training loop inside it; rank 0 writes `run.json` into the folder, from which `gradwire report` makes a page.

    Made by `handle.record(folder)`. Other ranks may enter it too and record nothing. Training goes on inside as without it:
    nothing is sent, and no tensor is changed. The file is written when the loop is over, by an error too, and every minute
    meanwhile. Every `error_steps` steps some tensors are encoded once more, to see what that loses; 0 never does. What this
    takes is not counted in the times of steps.

    A timeline is measured on CPUs only: on an accelerator lanes queue their work and do not see when it is done.

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
        whole(
            "error_steps", error_steps, "steps from one measurement of errors to the next, 0 for none", error=PlanError
        )
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
        """The step of the last forward; the engine's count when the last step was kept."""
        self._tensors = Tensors(session.group)
        self._watched: deque[Watched] = deque(maxlen=TIMELINE_STEPS)
        self._times: list[TaskTimes] = []
        """What lanes do for the step in hand; they may go on with it in the next one."""
        self._codec_us: list[float] = []
        self._made = Made.now()
        self._start = self._saved = time.perf_counter()
        self._forward: float | None = None
        """When the forward of the last step began; None before the first."""
        self._open = False
        """Whether a forward began and its exchange is not over."""
        self._in_backward: float = 0.0
        self._ready: list[tuple[str, float]] = []
        self._ended: float | None = None
        """When the last exchange, and what was measured after it, was over."""
        self._finished_s = 0.0
        self._aside_s = 0.0
        """What was spent on measuring in the last step."""
        self._hooks: list[Any] = []

    # ---- what the user calls

    def __enter__(self) -> Self:
        model = self._model()
        if self._group.rank == 0 and model is not None:
            make_folder(self._path.parent)
            self._reducer.observers.add(self)
            parameters = self._session.parameters.values()
            self._gradients = GradientHooks(self, Recording._coming, Recording._became_ready, parameters)
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._gradients.remove()
        self._reducer.observers.remove(self)
        self._lanes.times = None
        if self._forward is None and error is None:
            warnings.warn(
                f"nothing was recorded in {self._path.parent}: a step begins with a call of the model itself, not of its parts, "
                "and there was none inside record().",
                stacklevel=2,
            )
        try:
            self.run().save(self._path)
        except Exception as problem:
            if error is None:
                raise
            self._warn(problem)  # the script's own error matters more

    def log(self, loss: Any) -> None:
        """This rank's loss of the step in hand, or of the last one when no forward has begun since: a number, or a tensor of
        one element. Costs no synchronisation with a device.

        Raises StepStateError before the first step, ValueError for what is no real number or a tensor of several elements.
        """
        if self._group.rank != 0:
            return
        if self._forward is None:
            raise StepStateError(
                "loss was logged before the model's first forward inside record(): there is no step yet."
            )
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss has shape {tuple(loss.shape)}: log one number a step, such as loss.mean().")
            if loss.is_complex():
                raise ValueError(f"loss is a tensor of {loss.dtype}: log a real number.")
            loss = loss.detach().clone()  # the script may write the next one to the same memory
        else:
            loss = _number(loss)
        self._losses[self._number] = loss
        if len(self._losses) > 2 * MOST_STEPS:
            kept = {each.step for each in self._steps} | {self._number}
            self._losses = {at: each for at, each in self._losses.items() if at in kept}

    def timeline(self) -> Timeline:
        """One step as it was measured: of the last ones the one of median length. The first step, of which no end of an exchange
        before is known, counts only where it is alone.

        Raises StepStateError where there is none.
        """
        if not self._watched:
            raise StepStateError(
                "no step has a timeline: it is measured on rank 0, on CPUs, from the first whole step inside record() on."
            )
        watched = [each for each in self._watched if each.ended < each.forward] or list(self._watched)
        chosen = sorted(watched, key=lambda each: each.finished - each.ended)[(len(watched) - 1) // 2]
        stats = self._stats()
        sent = Sent(stats.wire_bytes, stats.intra_bytes, stats.inter_bytes)
        schedule = self._session.plan.schedule.word
        return measured_timeline(chosen.moments(), schedule, self._group.grid.nodes, sent)

    def run(self) -> Run:
        """Everything so far. Raises StepStateError on ranks other than 0, which record nothing."""
        if self._group.rank != 0:
            raise StepStateError(f"rank {self._group.rank} records nothing: ask on rank 0.")
        exchange, stats = self._session.exchange, self._stats()
        self._go_back()
        self._tensors.use(exchange, self._reducer.step)
        losses = {step: float(loss) for step, loss in self._losses.items()}
        not_finite = [step for step, loss in losses.items() if not math.isfinite(loss)]
        return Run(
            made=self._made,
            model=self._name,
            device=str(self._device),
            world_size=self._group.world_size,
            nodes=self._group.grid.nodes,
            decision=self._decision() if callable(self._decision) else self._decision,
            plan=exchange.plan,
            steps=tuple(
                msgspec.structs.replace(step, loss=losses[step.step])
                if math.isfinite(losses.get(step.step, math.nan))
                else step
                for step in self._steps
            ),
            buckets=tuple(
                BucketRecord(
                    numel=each.numel,
                    chunks=each.chunks,
                    gradient_bytes=each.gradient_bytes,
                    wire_bytes=each.wire_bytes,
                    intra_bytes=each.intra_bytes,
                    inter_bytes=each.inter_bytes,
                )
                for each in stats.buckets
            ),
            tensors=self._tensors.records(),
            memory=stats.memory,
            timeline=self.timeline() if self._watched else None,
            notes=(f"The loss was not finite in {len(not_finite)} steps, first in step {not_finite[0]}.",)
            if not_finite
            else (),
        )

    # ---- hooks

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
        self._save_meanwhile(now)
        self._lanes.times = [] if self._device.type == "cpu" else None
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

    def _became_ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._open and self._reducer.synchronise:
            self._ready.append((self._names[index], time.perf_counter()))

    def measured(self, report: StepReport) -> None:
        self._codec_us.append(report.codec_s * 1e6)

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
        if self._lanes.times is not None:
            ended = self._forward if self._ended is None else self._ended
            before, self._times = self._times, self._lanes.times
            self._watched.append(
                Watched(ended, self._aside_s, self._forward, self._in_backward, self._ready, before, self._times, now)
            )
        if self._seen % self._every == 0:
            self._steps.append(
                StepRecord(
                    step=step,
                    end_s=now - self._start,
                    step_us=(now - self._forward) * 1e6,
                    exposed_us=exposed_s * 1e6,
                    codec_us=self._codec_us[-1] if self._codec_us else 0.0,
                    loss=None,
                )
            )
            self._codec_us = []
        self._seen, self._newest = self._seen + 1, self._reducer.step
        if len(self._steps) > MOST_STEPS:
            del self._steps[1::2]
            self._every *= 2

    def _save_meanwhile(self, now: float) -> None:
        if now - self._saved < SAVE_EVERY_S:
            return
        try:
            self.run().save(self._path)
        except Exception as problem:
            self._warn(problem)  # training matters more
        self._saved = time.perf_counter()

    def _go_back(self) -> bool:
        """Forget steps that the script undid by loading a state of before. Whether it did."""
        step = self._reducer.step
        if step >= self._newest:
            return False
        self._steps = [each for each in self._steps if each.step < step]
        self._losses = {at: loss for at, loss in self._losses.items() if at < step}
        self._tensors.forget_from(step)
        self._watched.clear()
        self._codec_us, self._open, self._newest = [], False, step
        return True

    def _warn(self, problem: Exception) -> None:
        warnings.warn(f"the record of this run: {type(problem).__name__}: {problem}", stacklevel=3)


def _number(loss: object) -> float:
    if not isinstance(loss, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(loss)  # type: ignore[arg-type]
    raise ValueError(f"loss is {show(loss)}: log a real number, or a tensor of one element.")


class Watched(NamedTuple):
    """When what happened in one step. Lanes may still add to what they do for it."""

    ended: float
    aside_s: float
    """What the recording itself took just before: exchanges that began meanwhile are shown from `ended` on."""
    forward: float
    backward: float
    ready: list[tuple[str, float]]
    before: list[TaskTimes]
    own: list[TaskTimes]
    finished: float

    def moments(self) -> Moments:
        """With the tasks that ran in the step's time, those of the step before too: a gather may begin just before it does."""

        def shown(moment: float) -> float:
            return max(moment, self.ended)

        tasks = [
            LaneTask(
                each.task.bucket,
                each.task.chunk,
                each.task.phase,
                each.option,
                shown(each.began),
                shown(each.ended),
                [(shown(began), shown(ended)) for began, ended in each.codec],
                step,
            )
            for times, step in ((self.before, -1), (self.own, 0))
            for each in list(times)
            if self.ended - self.aside_s < each.ended and each.began <= self.finished
        ]
        return Moments(self.ended, self.forward, self.backward, self.ready, tasks, self.finished)
