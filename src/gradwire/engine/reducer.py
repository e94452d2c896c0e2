"""The reducer: one step of one model at a time, from gradient-ready events to what its schedule makes of the means.

The states of a step, `StepState`:
1. IDLE. The first gradient-ready event of a synchronised backward, or a schedule that launches steps by itself, begins a step:
   `begin` starts the lanes of one exchange, and a callback is queued for the end of this backward.
2. RUNNING. After each event and the script's own hooks the gradient is noted. When a run of gradients is complete it is lent to
   the lanes, or copied, times 1/world_size, into the slots, which become the grads. A bucket's last run starts its exchange.
3. CLOSING, from the callback on. Gradients that never came are filled in (zeros, or what earlier backwards without
   synchronisation left). One small exchange tells how each rank's backward went and which parameters it used. What else is
   awaited is the schedule's. Parameters no rank used keep the grad they had, as under DDP. Then IDLE.
4. VOID. A backward that was left in the middle (an exception that the script caught) is ended in order: what is missing travels
   as zeros and the control exchange says so. So all ranks raise in the same step, and `reset` makes all of them IDLE again.
5. BROKEN, after a collective failed. It stays so.

A rank without batches takes part in steps with zeros and without a backward (`run_out`). Where reentrant checkpointing runs
backwards inside the backward, everything is sent when the outermost backward ends. The first forward is searched for such
checkpoints; one that comes later is noticed by its first gradient.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

from gradwire.core import show
from gradwire.engine.batch_weights import BatchWeights
from gradwire.engine.control import BackwardState, ControlExchange, RankReports, exchange_reports
from gradwire.engine.gradients import AnyGradient, AnyRun, gradients_of
from gradwire.engine.schedules.base import Closed, Launches, Missing, ScheduleEvents, SeesBackward
from gradwire.engine.torch_hooks.hooks import (
    NO_BACKWARD,
    Arrivals,
    GradientHooks,
    ModelHook,
    has_reentrant,
    in_reentrant_backward,
    reentrant_refusal,
)
from gradwire.engine.torch_hooks.optimizer_step import is_of_script
from gradwire.errors import GradwireError, PlanError, StepStateError
from gradwire.exchange import Exchange, Slot, StepReport
from gradwire.transport import Lanes

_SHAPE = torch.Tensor.size  # quicker than `shape`


class StepState(Enum):
    IDLE = "idle"
    RUNNING = "running"
    CLOSING = "closing"
    VOID = "void"
    """All ranks raised; `reset` goes on."""
    BROKEN = "broken"
    """Nothing goes on."""


class Observer:
    """Sees the steps of a reducer. Register it with `Reducer.observers.add`, which does not keep it alive."""

    def begins(self) -> None:
        """The first gradient of a step came; nothing is sent yet."""

    def local_step(self) -> None:
        """A local step is over; what it exchanges or waits for comes after this."""

    def finished(self, exposed_s: float) -> None:
        """A step counts, at the end of its backward, where `exposed_s` seconds were waited for it. The newest observer is called
        first."""

    def idle(self) -> None:
        """All observers know that the step is finished."""

    def measured(self, report: StepReport) -> None:
        """The lanes are done with a step: where steps overlap, when the next one has begun."""


class Observers:
    """The observers of one reducer, the newest first. They are not kept alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Observer]] = []

    def __iter__(self) -> Iterator[Observer]:
        for reference in list(self._references):
            if (observer := reference()) is not None:
                yield observer

    def add(self, observer: Observer) -> None:
        """Call it in every step, before all others."""
        self._references.insert(0, weakref.ref(observer))

    def remove(self, observer: Observer) -> None:
        """Call it no more."""
        self._references = [reference for reference in self._references if reference() not in (observer, None)]

    def begins(self) -> None:
        """The first gradient of a step came."""
        for observer in self:
            observer.begins()

    def local_step(self) -> None:
        """A local step is over."""
        for observer in self:
            observer.local_step()

    def finished(self, exposed_s: float) -> None:
        """A step counts, and its backward returns."""
        observers = list(self)
        for observer in observers:
            observer.finished(exposed_s)
        for observer in observers:
            observer.idle()

    def measured(self, report: StepReport) -> None:
        """The lanes are done with a step."""
        for observer in self:
            observer.measured(report)


T = TypeVar("T")


def told_to_all(act: Callable[..., T], script_steps: bool = False) -> Callable[..., T]:
    """For methods of reducers and schedules that are gradwire's own part of a step. Where it fails (memory is short), nobody
    knows how much was done, and `leave` could wait for ever: so the step fails on all ranks, with the reason. `script_steps`:
    the script calls it by `optimizer.step()`, and what its optimizer raises is its own affair."""

    @wraps(act)
    def told(owner: Any, *arguments: Any) -> T:
        try:
            return act(owner, *arguments)
        except GradwireError:
            raise
        except BaseException as error:
            if script_steps and is_of_script(error):
                raise
            reducer: Reducer = getattr(owner, "_reducer", owner)
            failed = reducer.lanes.failed_here("the step", error, reducer.step)
            if isinstance(error, Exception):
                raise failed from error
            raise

    return told


class Reducer:
    """The steps of one model. Made once for a model; its exchange, its schedule and its parameters may change between steps."""

    def __init__(self, lanes: Lanes, drift_check_steps: int) -> None:
        self.lanes, self.group = lanes, lanes.group
        lanes.end_left = weakref.WeakMethod(self._end_left)
        self.control = ControlExchange(lanes, drift_check_steps)
        """The exchange of reports at the end of a step."""
        self.batches = BatchWeights()
        """The weights of this rank's batches."""
        self.step = 0
        """Steps so far: the number of the next one, or of the one that runs."""
        self.synchronise = True
        """False inside `no_sync`."""
        self.sends_all = False
        """True inside `sending`."""
        self._decided: tuple[int, bool] = NO_BACKWARD, True
        """The last backward that began, and whether it sends or only accumulates."""
        self.active: list[int] = []
        """Ranks of the group that had a batch in the last step."""
        self.left_by: list[int] = []
        """Ranks of the group that had a batch in the last step and did not end it, if the step is void."""
        self.ready_order: list[int] = []
        """Indices in the order in which the gradients of the last step came."""
        self.first_gradient_s = -1.0
        """When the first gradient of the last step came (time.perf_counter); -1 where no gradient is sent in backward."""
        self.parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self.arrivals = Arrivals()
        self.gradients: list[AnyGradient] = []
        """The gradients that scripts get, in the order of the parameters."""
        self._runs: list[AnyRun] = []
        self.watched = 0
        """How often it was given parameters."""
        self.observers = Observers()
        self._schedule: weakref.ref[ScheduleEvents] | None = None
        self._state = StepState.IDLE
        self._deferred = False
        """Whether gradients are only collected, since backwards run inside the backward."""
        self._seen = False
        """Whether a backward was finished: what its graph is like is known then."""
        self._used: set[int] = set()
        self._put_back: Callable[[], None] | None = None
        """The function that gives the exchange the residuals of before the step, where ranks train alone."""
        self._outer_task = -1
        self._outermost_task, self._began_inside = NO_BACKWARD, False
        """The backward that reached an output of the model and has not ended, and whether its step began in a backward inside."""
        self._release: weakref.finalize[..., ScheduleEvents] | None = None
        self._hooks = GradientHooks(self, Reducer.gradient_coming, Reducer.gradient_ready)

    @property
    def schedule(self) -> ScheduleEvents:
        """The one that runs its steps. Whoever owns the reducer keeps it alive."""
        schedule = self._schedule() if self._schedule is not None else None
        assert schedule is not None, "the schedule is gone before the reducer"
        return schedule

    def use(self, schedule: ScheduleEvents) -> None:
        """Run steps by this schedule, of which the caller has detached the one before. `watch` and `attach` must follow."""
        self.batches.watch_parts(0)
        self._schedule, self._deferred = weakref.ref(schedule), False

    def watch(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Synchronise the gradients of these, by name and in registration order. `attach` must follow."""
        self._hooks.remove()
        used = {id(self.parameters[index]()) for index in self._used}  # the change may come between accumulated backwards
        self.names = list(parameters)
        self.parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self.control.watch(self.names, self.parameters)
        self._used = {index for index, parameter in enumerate(parameters.values()) if id(parameter) in used}
        self._seen = False
        self.watched += 1
        traits = self.schedule.traits
        before = Reducer._before_gradient if traits.acts_before_gradients else None
        coming, ready = (Reducer.gradient_coming, Reducer.gradient_ready) if traits.sends_in_backward else (None, None)
        hooked = parameters.values() if traits.sends_in_backward or before else ()
        self._hooks = GradientHooks(self, coming, ready, hooked, before, self.arrivals)

    def attach(self, exchange: Exchange) -> None:
        """Run this exchange from the next step on."""
        others = vars(self).get("exchange") is not exchange
        self.exchange = self.running = exchange
        self.control.plan = int(exchange.plan.digest()[:16], 16)
        self.slots: list[Slot] = [exchange.slots[name] for name in self.names]
        """The places of the parameters, in the exchange of the step that runs, or ran last."""
        if others:
            sends = self.schedule.traits.sends_in_backward
            self.gradients, self._runs = gradients_of(exchange, self.names) if sends else ([], [])
            self.arrivals.attach([run.indices for run in self._runs], self.schedule.traits.acts_before_gradients)
            self._hooks.renew(self.arrivals.last_ones)
        self.schedule.attach()
        if self._release is not None:
            self._release.detach()
        if not callable(release := self.schedule.let_go()):
            raise PlanError(
                f"let_go of {type(self.schedule).__name__} returned {show(release)}: it must return the function that ends a "
                "step which was left when the model is gone. Return reducer.exchange.give_up."
            )
        # a step that was left in the middle keeps lanes waiting for gradients: when nobody can bring them, they go
        self._release = weakref.finalize(self.schedule, release)

    def detach(self) -> None:
        """Remove the hooks and let the lanes go."""
        self._hooks.remove()
        self.schedule.detach()
        if self._release is not None:
            self._release()

    def living(self) -> list[torch.nn.Parameter | None]:
        """The parameters that are still there."""
        return [reference() for reference in self.parameters]

    @property
    def state(self) -> StepState:
        if self.lanes.failure is not None:
            return StepState.VOID if self.lanes.mendable else StepState.BROKEN
        return self._state

    @property
    def in_hand(self) -> bool:
        """Whether a backward began a step that is not over, or was left before its end."""
        return self._state is StepState.RUNNING or (self._state is StepState.CLOSING and bool(self.gradients))

    @property
    def next_step(self) -> int:
        """The number of the step whose forward begins next."""
        return self.step + (self._state is StepState.CLOSING)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Let backwards inside send, also those whose forwards were inside `no_sync`."""
        before = self.synchronise, self.sends_all
        self.synchronise = self.sends_all = True
        try:
            yield
        finally:
            self.synchronise, self.sends_all = before

    # ---- events of a backward

    def expect_graph(self, outputs: list[torch.Tensor]) -> None:
        """A forward made and returned these. As in DDP the place of the forward decides whether its backward sends; a backward of
        several forwards does if one of them decided so."""
        schedule = self.schedule
        decide = ModelHook(self, Reducer._sends_now if self.synchronise else Reducer._only_accumulates)
        for output in outputs if schedule.traits.sends_in_backward else ():
            output.register_hook(decide)
        if not self.synchronise:
            return
        if schedule.traits.sends_in_backward:
            if not self._seen and not self._deferred:
                self._deferred = has_reentrant(outputs)
            if self._deferred:
                for output in outputs:
                    # the graph keeps the schedule alive, also when the model is dropped before its backward
                    output.register_hook(lambda gradient, keeps=schedule: self._outermost())
        if isinstance(schedule, SeesBackward):
            schedule.after_forward(outputs)

    def _sends_now(self, gradient: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._outermost_task):
            # a backward inside this one may bring the first gradient, and cannot ask for a call at the end of this one
            self._outermost_task = task
            Variable._execution_engine.queue_callback(self._end_outermost)
        self._decided = task, True

    def _only_accumulates(self, gradient: torch.Tensor) -> None:
        if self.sends_all:
            self._sends_now(gradient)
        elif self._decided[0] != (task := torch._C._current_graph_task_id()):
            self._decided = task, False

    @property
    def _sends(self) -> bool:
        """Whether the backward that runs sends. Without an output of the model `no_sync` decides where backward runs."""
        task = torch._C._current_graph_task_id()
        if not self.in_hand and task != self._decided[0] and not in_reentrant_backward():  # that is part of another one
            self._decided = task, self.synchronise
        return self.in_hand or self._decided[1]

    @told_to_all
    def _before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        self.schedule.before_gradient(index, parameter)

    @told_to_all
    def gradient_coming(self, index: int, parameter: torch.nn.Parameter) -> bool:
        """A gradient was accumulated into parameter.grad, and hooks of the script may follow. Returns whether it belongs to a
        step."""
        self._used.add(index)
        if not self._sends:
            return False
        self.lanes.check()
        if not self.in_hand:
            if in_reentrant_backward():
                self._begin_inside(index)
            else:
                self._begin_in_backward()
        elif not self._deferred:
            if torch._C._current_graph_task_id() == self._outer_task:
                self._fill_complete()
            elif not in_reentrant_backward():
                raise was_left(self, f"gradient {self.names[index]!r} belongs to a new backward")
            else:  # inside the backward we know each parameter's gradient is still counted once: look at each from now on
                self.arrivals.task = NO_BACKWARD
            if index in self.arrivals.came:
                raise leave(
                    self,
                    f"the gradient of {self.names[index]!r} became ready twice in step {self.step}: it is used inside a "
                    "reentrant checkpoint and outside of it. Use checkpoint(..., use_reentrant=False).",
                )
        return True

    @told_to_all
    def gradient_ready(self, index: int, parameter: torch.nn.Parameter, accumulated: torch.Tensor | None) -> None:
        """A gradient came that is its run's last one in the plan's order, and all hooks on it are over. Where another one came
        last, the run is taken when the next gradient of this backward comes, or at its end."""
        self.arrivals.heard.add(index)
        if not self._deferred and torch._C._current_graph_task_id() == self._outer_task:
            self._fill_complete(None if accumulated is None else (index, accumulated))

    @told_to_all
    def _outermost(self) -> None:
        if self._sends and not self.in_hand:
            self._begin_in_backward()

    def _begin_in_backward(self) -> None:
        self.lanes.check()
        if torch._C._current_graph_task_id() == -1:
            raise StepStateError("this backward is compiled autograd, whose end gradwire cannot see. Switch it off.")
        self._outer_task = torch._C._current_graph_task_id()
        self.begin_beside()
        self.arrivals.task = NO_BACKWARD if self._deferred else self._outer_task
        Variable._execution_engine.queue_callback(partial(self._end, BackwardState.DONE))

    def _begin_inside(self, index: int) -> None:
        """Begin a step in a backward inside the backward, where a reentrant checkpoint came in a later step than the first. From
        now on everything is sent when the outermost backward ends. Raises StepStateError if that one is not known."""
        if self._outermost_task == NO_BACKWARD:
            raise reentrant_refusal(self.names[index])
        self._deferred = self._began_inside = True
        self._outer_task = self._outermost_task
        self.begin_beside()

    def _end_outermost(self) -> None:
        self._outermost_task = NO_BACKWARD
        if self._began_inside:
            self._began_inside = False
            self._end(BackwardState.DONE)

    def begin_beside(self) -> None:
        """Begin a step as all ranks do: first they tell each other what a step needs, whether they have a backward or not."""
        if self.schedule.traits.sends_in_backward:
            self.observers.begins()
        self.begin_by_schedule()

    def begin_by_schedule(self) -> None:
        """Let the schedule begin a step. Raises StepStateError if it does not."""
        self.schedule.on_begin()
        if self._state is not StepState.RUNNING:
            name = type(self.schedule).__name__
            raise StepStateError(f"on_begin of {name} did not call reducer.begin(exchange), as it must: no step runs.")

    def begin(self, exchange: Exchange, buckets: Sequence[int] | None = None, part: int = 0) -> None:
        """Begin a step with these buckets of this exchange, or all. Schedules call it, in `on_begin`. `part`: the fragment that
        the buckets are, where ranks train alone."""
        self.arrivals.begin()
        self.left_by = []
        if exchange is not self.running:
            self.running = exchange
            self.slots = [exchange.slots[name] for name in self.names]
        self.first_gradient_s = time.perf_counter() if self.gradients else -1.0
        exchange.begin(step=self.step, buckets=buckets)
        self._state = StepState.RUNNING
        self.batches.begin(exchange, part, self.schedule.traits.weighs_batches)
        self._put_back = exchange.keep_residuals() if self.schedule.traits.trains_alone else None

    def may_send(self) -> bool:
        """Whether a forward that begins now may send: not one that recomputes activations inside a backward, nor one in a forked
        process, where only a backward is refused.

        Raises if the last backward failed or was left.
        """
        if self.lanes.shared.forked_from is not None:
            return False
        self.lanes.check()
        inside = torch._C._current_graph_task_id() != -1
        if not inside:
            self._outermost_task, self._began_inside = NO_BACKWARD, False  # an exception may have left the last backward
            if self.in_hand:
                raise was_left(self, "a new forward begins")
        return not inside

    def _end_left(self) -> None:
        """Another handle of the same lanes is about to use them: a step whose backward was left ends, void on all ranks."""
        left = self.in_hand and self.schedule.traits.sends_in_backward and self.lanes.failure is None
        if left and torch._C._current_graph_task_id() != self._outer_task:
            was_left(self, "a step of another handle begins")

    def take_back_all(self) -> None:
        """No rank uses what was summed: residuals take it back. Where ranks train alone their weights have it still, so residuals
        become what they were."""
        if self._put_back is not None:
            self._put_back()
            return
        for slot in self.slots:
            self.running.take_back(slot)

    # ---- gradients

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """The slot of a parameter takes this rank's share of the mean; zeros without a gradient. `send` must follow."""
        if gradient is not None:
            self.arrivals.came[index] = None
        self._write(index, gradient)

    def send(self, *indices: int) -> None:
        """The slots of parameters, of one bucket, are as they are to be sent."""
        self.running.ready([self.slots[index] for index in indices])

    def unsent(self) -> list[int]:
        """The parameters whose slots are not ready in this step."""
        return [index for index, slot in enumerate(self.slots) if slot not in self.running.sent]

    @torch.no_grad()
    def _fill(self, run: AnyRun, calling: tuple[int, torch.Tensor] | None = None) -> None:
        """All gradients of a run are ready: copy them into their slots, which become the parameters' grads, or lend them."""
        self.running.check_lanes()
        parameters, grads = [], []
        for index in run.indices:
            parameter = self.parameters[index]()
            grad = parameter.grad if parameter is not None else None
            if parameter is None or grad is None or grad.is_sparse:
                raise not_sent(self, index, grad)
            parameters.append(parameter)
            grads.append(grad)
        if list(map(_SHAPE, grads)) != run.shapes:
            at = next(at for at, (grad, shape) in enumerate(zip(grads, run.shapes, strict=True)) if grad.shape != shape)
            raise not_sent(self, run.indices[at], grads[at])
        means = run.fill(grads, calling)
        for parameter, grad, mean in zip(parameters, grads, means, strict=True):
            if mean is not grad:
                parameter.grad = mean
        self.running.ready(run.slots)

    def _write(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None and (grad.is_sparse or grad.shape != self.slots[index].view.shape):
            raise not_sent(self, index, grad)
        self.running.place(self.slots[index], grad)

    def _fill_complete(self, calling: tuple[int, torch.Tensor] | None = None) -> None:
        complete, self.arrivals.complete = self.arrivals.complete, []
        for run in complete:
            self._fill(self._runs[run], calling)

    def _fill_rest(self) -> None:
        """Send what came, at the end of backward: also of runs some of whose gradients did not come."""
        self._fill_complete()
        for run in (run for run, left in zip(self._runs, self.arrivals.left, strict=True) if left):
            for at, index in enumerate(run.indices):
                if index in self.arrivals.came:
                    self._fill(run.alone(at))
        if self.arrivals.some_silent:
            self._hooks.renew(self.arrivals.last_ones)  # a parameter's memory was replaced, and its node with it

    def _fill_missing(self, index: int, parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        """Fill the slot of a gradient that did not come in this backward; returns what the grad was."""
        if parameter is not None and self.schedule.traits.acts_before_gradients:
            self.schedule.before_gradient(index, parameter)
        gradient = self.gradients[index]
        grad = parameter.grad if parameter is not None else None
        own = grad.clone() if grad is not None and grad is gradient.handed else grad
        gradient.take_over(grad)
        self._write(index, own)
        self.send(index)
        return own

    def settle_missing(self, missing: Missing) -> None:
        """Give a parameter without a gradient in this backward the mean, or where no rank used it what it had."""
        gradient = self.gradients[missing.index]
        if not missing.used_anywhere:
            self.running.take_back(gradient.slot)
        if (parameter := self.parameters[missing.index]()) is not None:
            gradient.settle(parameter, missing.own, missing.used_anywhere)

    def tell(self, state: BackwardState) -> "Future[RankReports]":
        """Send this rank's report to all ranks, and receive theirs. A rank reports after its lanes' last task: a step counts on
        all ranks or none."""
        self._used.update(self.arrivals.came)
        idle = state is BackwardState.OUT or (state is BackwardState.DONE and not self.running.weight)
        if idle and any(spec.votes for spec in self.running.plan.specs):
            state = BackwardState.NO_VOICE
        self._state, self.arrivals.task = StepState.CLOSING, NO_BACKWARD
        after, self.control.samples = self.running.last_task, self.batches.running
        return self.control.tell(self.step, state, len(self.arrivals.came), self._used, after)

    def run_out(self) -> None:
        """One step of a rank without a batch: zeros for all gradients, no backward."""
        self.lanes.check()
        schedule = self.schedule
        if isinstance(schedule, Launches):
            schedule.send_nothing(BackwardState.OUT)
            return
        self.begin_beside()
        self._end(BackwardState.OUT)

    @told_to_all
    @torch.no_grad()
    def _end(self, state: BackwardState) -> None:
        kept: dict[int, torch.Tensor | None] = {}
        if self._deferred:
            self.ready_order = list(range(len(self.names)))
        else:
            self._fill_rest()
            self.ready_order = list(self.arrivals.came)
        for index in self.unsent():
            parameter = None if state is BackwardState.OUT else self.parameters[index]()
            kept[index] = self._fill_missing(index, parameter)
        start = time.perf_counter()
        reports = self.hear(self.tell(state), self.schedule.on_end)
        exposed_s = time.perf_counter() - start
        self.control.close_step(reports, self.step)
        self.weigh(reports, reports.used)
        for index in reports.used:
            self.slots[index].owed = None
        missing = [Missing(index, own, index in reports.used) for index, own in kept.items()]
        self._seen = self._seen or state is BackwardState.DONE
        self.counted(reports)
        self.schedule.on_closed(Closed(exposed_s, missing, reports))
        if not self.schedule.traits.lanes_busy_between_steps:
            self.running.release()
        self.observers.finished(exposed_s)

    def weigh(self, reports: RankReports, used: Iterable[int]) -> None:
        """The step counts: make weighted means of the sums of these parameters, if scripts gave weights."""
        if (factor := self.batches.settle(reports)) != 1:
            self.running.multiply([self.slots[index] for index in used], factor)

    def counted(self, reports: RankReports) -> None:
        """The step counts: the next one is another."""
        out = set(reports.ranks_in(BackwardState.OUT))
        self.active = [rank for rank in range(self.group.world_size) if rank not in out]
        self._used, self._state, self._put_back = set(), StepState.IDLE, None
        self.step += 1

    def hear(
        self, told: "Future[RankReports]", wait: "Callable[[Future[RankReports]], None]", leaving_is_void: bool = True
    ) -> RankReports:
        """`wait` for what all ranks tell of the step, and for what else the schedule awaits. Raises on all of them when the step
        is void; nothing is under way then. `leaving_is_void`: one that a rank left is."""
        wait(told)
        reports = told.result()
        self.control.check_complete(reports)
        if problem := self.control.why_void(reports, leaving_is_void):
            self.left_by = [*reports.ranks_in(BackwardState.LEFT)]
            self.batches.void(reports)
            self.running.wait()
            self.take_back_all()
            mendable = len({report.plan for report in reports.each}) == 1
            raise self.lanes.fail(StepStateError(problem), mendable)
        return reports

    def converted(self) -> str | None:
        """The first parameter whose gradient no longer fits its slot (`model.to(dtype)`)."""
        for name, slot, reference in zip(self.names, self.slots, self.parameters, strict=True):
            if (parameter := reference()) is not None and not slot.fits(parameter):
                return repr(name)
        return None

    def idle(self, next_step: int | None = None) -> None:
        """The step in hand is over, and did not count. `next_step`: all ranks go on with this one, without its gradients."""
        self._state, self._put_back = StepState.IDLE, None
        if next_step is not None:
            self.step, self._used = next_step, set()


# ---- what all ranks do when one of them cannot make its step


def was_left(reducer: Reducer, what_now: str) -> GradwireError:
    """End the step of a backward that was left. Returns the error to raise here."""
    return leave(
        reducer,
        f"{what_now}, but step {reducer.step} of the last backward is not finished: {len(reducer.arrivals.came)} of "
        f"{len(reducer.names)} gradients came, then it was left (an exception in it?). All ranks raise and none may use "
        "this step's gradients: call handle.reset() on all of them and go on with the next batch, or restart.",
    )


def not_sent(reducer: Reducer, index: int, grad: torch.Tensor | None) -> GradwireError:
    """End the step of a gradient that cannot be sent: it is gone, sparse or of another shape. Returns the error to raise here."""
    reducer.arrivals.came.pop(index, None)
    if grad is None:
        why = (
            "was gone when it was to be sent: a hook used it and set it to None (an optimizer in backward?). gradwire averages "
            "after all hooks; step the optimizer after backward."
        )
    elif grad.is_sparse:
        why = "is sparse; gradwire sends dense gradients. Use Embedding(..., sparse=False)."
    else:
        why = (
            f"has shape {tuple(grad.shape)}, and the plan was made for {tuple(reducer.slots[index].view.shape)}: the parameter "
            "changed, and no forward of the whole model came since. Call handle.reset(), then handle.attach(), on all ranks."
        )
    return leave(reducer, f"the gradient of {reducer.names[index]!r} {why}")


def taken_in_backward(reducer: Reducer, name: str, optimizer: str) -> GradwireError:
    """End the step of a backward in which a script steps an optimizer. Returns the error to raise here."""
    called, cure = f"{optimizer}.step() was called inside backward", "Step the optimizer after backward."
    if not reducer.schedule.traits.sends_in_backward:
        word = reducer.exchange.plan.schedule.word
        return StepStateError(
            f"{called} and steps {name!r}: the {word} schedule may exchange and replace weights in optimizer.step(), and the "
            f"rest of this backward needs the weights that it began with. {cure}"
        )
    words = (
        f"{called} and takes the gradient of {name!r} before its exchange has ended: each rank would step by its own gradient, "
        f"and weights would drift apart. {cure}"
    )
    reducer.lanes.check()
    if not reducer.in_hand:
        reducer.begin_beside()
    return leave(reducer, words)


def scaled_too_far(reducer: Reducer, words: str) -> GradwireError:
    """End the step of a backward whose loss was multiplied by a scale that a spec does not follow, as the words say. Returns the
    error to raise here."""
    reducer.lanes.check()
    reducer.begin_by_schedule()
    return leave(reducer, words)


@torch.no_grad()
def leave(reducer: Reducer, words: str) -> GradwireError:
    """End the step with zeros for what is missing, and tell all ranks. Returns the error to raise here."""
    for index in reducer.unsent():
        if reducer.gradients:
            reducer.gradients[index].take_over(None)
        reducer.put(index, None)
        reducer.send(index)
    mendable = False
    with suppress(Exception):  # where ranks are gone too, this rank's own words matter more
        mendable = reducer.running.finish_quietly(reducer.tell(BackwardState.LEFT))
    reducer.take_back_all()
    return reducer.lanes.fail(StepStateError(words), mendable)


@told_to_all
@torch.no_grad()
def announce_change(reducer: Reducer) -> None:
    """Tell all ranks that this one's parameters changed. Returns when all said the same; raises on all when some ran
    a step instead, which is void."""
    reducer.lanes.check()
    for gradient, parameter in zip(reducer.gradients, reducer.living(), strict=False):
        if parameter is not None and parameter.grad is not None and parameter.grad is gradient.handed:
            parameter.grad = parameter.grad.clone()  # what was accumulated, before the slot is zeroed
        gradient.take_over(None)
    reducer.begin_beside()
    put_back = reducer.running.keep_residuals()
    for index in range(len(reducer.slots)):
        reducer.put(index, None)
        reducer.send(index)
    reducer.hear(reducer.tell(BackwardState.CHANGED), reducer.schedule.on_end)
    reducer.running.wait()
    put_back()  # zeros were encoded with them
    reducer.idle()


@told_to_all
def reset(reducer: Reducer) -> bool:
    """Begin anew after a void step, or one that this rank leaves now. Return whether there was one. Collective."""
    schedule = reducer.schedule
    reducer.batches.leave()
    left = isinstance(schedule, Launches) and schedule.before_reset()
    if reducer.lanes.failure is None:
        # a forward or a backward that raised before its first gradient: other ranks run the step that this rank leaves
        if reducer.arrivals.awaited and not reducer.in_hand and schedule.traits.sends_in_backward:
            reducer.begin_beside()
        if reducer.in_hand:
            was_left(reducer, "reset() was called")
    if (failure := reducer.lanes.failure) is not None:
        _mend(reducer, failure)
    if isinstance(schedule, Launches):
        schedule.after_reset()
    return left or failure is not None


def _mend(reducer: Reducer, failure: GradwireError) -> None:
    lanes = reducer.lanes
    if not lanes.mendable:
        raise type(failure)(f"reset() cannot mend this: {failure}")
    lanes.mendable = False
    own = reducer.control.report(reducer.step, BackwardState.DONE, 0, ())
    with lanes.told("all ranks to call reset()", reducer.step):
        exchange = partial(exchange_reports, own, len(reducer.names), tag=lanes.first_tag)
        reports = lanes.control.submit(exchange).result()
    lanes.mend()
    reducer.idle(1 + max(report.step for report in reports.each))
    for parameter in reducer.living():
        if parameter is not None:
            parameter.grad = None
