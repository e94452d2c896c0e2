"""The `delayed` schedule (OD-SGD, CD-SGD, BIT-SGD): the exchange of a step runs while the next step computes.

W(i) are the global weights that hold all updates through step i-1, L(i) a rank's own, on which step i computes (see
docs/papers/cd-sgd.md):

1. A training forward computes on L(i), and backward leaves this rank's own gradient g(i) in `grad`. Nothing is sent.
2. `optimizer.step()` ends step i-1: it waits for that exchange, and the optimizer makes W(i) of the mean, with the values that
   its groups had when the script stepped it. It also launches step i: g(i) is copied to the flat buffers and the lanes begin.
   If it had to wait, both go bucket by bucket, where the optimizer allows: a wire that is behind does not wait for all of the
   optimizer's work. Last L(i+1) = W(i) - local_lr * g(i).
3. Whoever looks at the weights before the next training forward ends step i too and sees W(i+1). That only waits, and
   changes nothing: L(i+1) is put back by the next training forward.

Warm-up steps (with `warmup_lands=False` all but the last) and all steps without local update land at once. A corrected bucket has
schemes of its own, with the correction's spec (none in the warm-up) in the same flat buffer. Which buckets a step corrects
follows from its number and the plan. Gradients of the next step cannot overwrite what is being sent: only step 2 writes there.

Compared with the `backward` schedule it needs one more copy of the weights (two while a script looks at them), and one of the
gradients, which the script's own and the flat buffers no longer share.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import msgspec
import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from gradwire.core import Delayed, printable
from gradwire.engine.buffers import BuffersBeside, shared_parameters
from gradwire.engine.control import BackwardState, RankReports
from gradwire.engine.prepare import Prepared, check_one_optimizer, same_parameters
from gradwire.engine.reducer import Reducer, told_to_all
from gradwire.engine.schedules.base import Closed, TrainingJob, Traits
from gradwire.engine.schedules.weights import (
    Launched,
    TwoWeights,
    Update,
    by_bucket,
    check_local,
    check_local_updates,
    finish_quietly,
    has_local_update,
    local_moves,
    show_for_forward,
)
from gradwire.engine.torch_hooks.hooks import ModelHook, hookable
from gradwire.engine.torch_hooks.loss_scale import LeftOutHook
from gradwire.engine.torch_hooks.optimizer_step import PastStepHook, Stepping, Whole, snapshot, step_later
from gradwire.engine.torch_hooks.settling import SettleFirst
from gradwire.engine.torch_hooks.splitting import why_at_once
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import CORRECTION, Exchange, Remembered, Saved, StepReport, added_up, divided, info_of, outside_modes
from gradwire.plan import correction_plan, with_buckets


class Corrections:
    """Which buckets a step uses, and what becomes of residuals in corrections."""

    def __init__(
        self,
        schedule: Delayed,
        usual: Exchange,
        parameters: Mapping[str, torch.nn.Parameter],
        step: int,
        before: "Corrections | None" = None,
    ) -> None:
        """Make the buckets of corrections, as they are in this step, in addition to the usual ones. Residuals are kept."""
        self.schedule = schedule
        self._usual, self._parameters = usual, parameters
        self._last: Exchange | None = None
        """The exchange that ran the last step, if that is known."""
        self._corrected: Exchange | None = None
        self._made: dict[tuple[int, ...], Exchange] = {(): usual}
        """The exchange that runs a step, by the buckets that it corrects."""
        self._kept_back: dict[str, torch.Tensor] = {}
        """The memory of corrected buckets before residuals were flushed into a step, until the step counts."""
        self._warming = warming = step < schedule.warmup_steps
        self._everything = tuple(range(len(usual.numels)))
        self._chosen_in = schedule.corrected(usual.compressed_bytes)
        if schedule.k is None and not warming:
            return
        sent = msgspec.structs.replace(schedule, correction=None) if warming else schedule
        plan = correction_plan(usual.plan, sent, [info_of(*item) for item in parameters.items()])
        self._corrected = made = Exchange.on(usual.lanes, parameters, plan, step, usual.flats)
        self._made[self._everything] = made
        if before is not None and before._corrected is not None:
            same = same_parameters(before._parameters, parameters)
            kept = before._corrected.residuals.carried()
            made.residuals.take_over(made.residuals.fitting({key: kept[key] for key in kept if key.partition("/")[2] in same}))

    @property
    def memory(self) -> Remembered | None:
        """The residuals of corrections, if there are any."""
        return self._corrected.residuals if self._corrected is not None else None

    @property
    def correcting(self) -> tuple[Exchange | None, float]:
        """The exchange of corrections, and the part of all steps after the warm-up that use each of them. None before there are
        any."""
        others = self._warming and self.schedule.correction is not None
        if self._corrected is None or self.schedule.every is None or others:
            return None, 0.0
        return self._corrected, 1 / self.schedule.every

    def at_step(self, step: int, keep: bool = False) -> "Corrections":
        """Return these corrections, or new ones if that step has others. New ones have residuals only with `keep`."""
        if not self.outdated(step):
            return self
        return Corrections(self.schedule, self._usual, self._parameters, step, self if keep else None)

    def outdated(self, step: int) -> bool:
        """Whether in this step the correction's spec is another one than in the step its buckets were made for, or in only one
        of the two there are any."""
        if (step < self.schedule.warmup_steps) != self._warming:
            return self.schedule.correction is not None or self.schedule.k is None
        return self._corrected is not None and self._corrected.outdated(step)

    def exchange_of(self, step: int) -> Exchange:
        """The exchange that runs a step: the usual buckets, but for those that the step corrects. The warm-up corrects all."""
        count = step - self.schedule.warmup_steps
        chosen = self._everything if count < 0 else self._chosen_in[count % len(self._chosen_in)]
        if chosen not in self._made:
            assert self._corrected is not None, "a step corrects, and nothing was made for it"
            buckets = [(self._corrected if index in chosen else self._usual).plan.buckets[index] for index in self._everything]
            plan = with_buckets(self._usual.plan, buckets)
            self._made[chosen] = self._usual.mixed_with(self._corrected, chosen, plan)
        runs = self._made[chosen]
        if runs is not self._last:
            runs.take_turn()
        self._last = runs
        return runs

    def add_residuals(self, exchange: Exchange, names: Iterable[str]) -> None:
        """If corrections flush, add to these gradients what error feedback kept back of them, where their bucket is corrected in
        this step, and forget it. See docs/papers/cd-sgd.md."""
        if not self.schedule.flush or exchange is self._usual:
            return
        corrected = self._usual.residuals_replaced_in(exchange)
        carried = corrected.carried()
        self._kept_back = dict(carried)
        for name in names:
            slot = exchange.slots[name]
            if (residual := carried.pop(f"residual/{name}", None)) is not None:
                placed = slot.in_memory(residual)
                exchange.flats[slot.bucket][slot.offset : slot.offset + placed.numel()] += placed
        corrected.take_over(carried)

    def landed(self, counts: bool, taken_back: bool = False) -> None:
        """A step is over. If it does not count, residuals are what they were, but for those that are `taken_back`, with the
        gradient that they were added to, into what corrections remember."""
        if self._kept_back and self._last is not None and not counts:
            theirs = set(self.memory.names()) if taken_back and self.memory is not None else set()
            restored = {key: value for key, value in self._kept_back.items() if key.partition("/")[2] not in theirs}
            corrected = self._usual.residuals_replaced_in(self._last)
            corrected.take_over(corrected.carried() | restored)
        self._kept_back = {}


_BEHIND_S = 0.001
"""Whoever waits longer for an exchange computes faster than the wire sends."""


class DelayedSchedule:
    """Local updates now, global updates one step later."""

    traits = Traits(sends_in_backward=False, sends_buffers=True, learns_order=False)

    def __init__(self, reducer: Reducer, schedule: Delayed, job: TrainingJob) -> None:
        self._reducer, self._data = reducer, schedule
        self._model, self._optimizer = weakref.ref(job.model), weakref.ref(job.optimizers[0])
        self._under_way: list[Launched] = []
        """At most one."""
        self._due: dict[int, torch.Tensor | None] = {}
        """Means that arrived, by parameter, and of which the optimizer has not made W yet."""
        self._update: Update | None = None
        """The function that makes W of them."""
        self._waited_s = 0.0
        """For the exchange of the last step."""
        self._landed: tuple[RankReports, float] | None = None
        """The reports of the last step, and the seconds that were waited for it, until the next `optimizer.step()`."""
        self._between = False
        """Whether a step landed, and the next one, whose gradients are there, is not launched yet."""
        self._last_act: Callable[[], None] | None = None
        """The function that `when_idle` was given meanwhile."""
        self._by_name: dict[str, torch.nn.Parameter] = {}
        self._watched = -1
        """Which of the reducer's parameters these are."""
        self._means: list[torch.Tensor | None] = []
        """The gradients of the backward at whose end this schedule began, until the next `optimizer.step()` or the next backward,
        which adds this rank's own to them: means already."""
        self._adds: list[RemovableHandle] = []
        """Hooks that tell of such a backward."""
        self._corrections: Corrections | None = None
        self._guard = SettleFirst(None, (), ModelHook(self, DelayedSchedule.settle))
        self._stepping = Stepping(job.optimizers[:1], self._step)
        past = PastStepHook(self, DelayedSchedule._refuse_past)
        with_hooks = [optimizer for optimizer in job.optimizers[:1] if hasattr(optimizer, "_optimizer_step_pre_hooks")]
        self._hooks = [optimizer.register_step_pre_hook(past) for optimizer in with_hooks]
        self._left_out = LeftOutHook(self, DelayedSchedule._step_with_zeros)
        self._hooks += [optimizer.register_step_post_hook(self._left_out) for optimizer in with_hooks]

    @staticmethod
    def check_optimizers(prepared: Prepared, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `ScheduleClass`."""
        schedule = prepared.plan.schedule
        assert isinstance(schedule, Delayed)
        check_one_optimizer(
            optimizers,
            prepared,
            many="the delayed schedule updates all weights at once, a step later",
            others="The delayed schedule updates a step later, with gradients that such tensors do not have any more",
        )
        owners = [spec for bucket in prepared.plan.buckets for spec in bucket.specs if spec.owns_momentum]
        if owners and (schedule.k is not None or schedule.warmup_steps):
            raise PlanError(
                f"{owners[0]!r} sends gradients with momentum, and corrections and warm-up steps send them as they are. Use "
                "gw.Delayed(k=None), or a spec without momentum."
            )
        if schedule.local_update and schedule.local_lr != 0 and schedule.local_step == "optimizer":
            check_local_updates(optimizers)

    @staticmethod
    def why_not(job: TrainingJob) -> str:
        """See `ScheduleClass`. Steps of an optimizer that was not passed raise."""
        has = {id(each) for optimizer in job.optimizers for group in optimizer.param_groups for each in group["params"]}
        lacks = (name for name, each in shared_parameters(job.model) if each.requires_grad and id(each) not in has)
        name = next(lacks, None)
        return f"no optimizer that was passed has {name!r}" if name is not None else ""

    def attach(self) -> None:
        reducer = self._reducer
        if self._watched != reducer.watched:
            self._watched = reducer.watched
            self._watch({name: p for name, p in zip(reducer.names, reducer.living(), strict=True) if p is not None})
        self._corrections = Corrections(self._data, reducer.exchange, self._by_name, reducer.step, self._corrections)

    def _watch(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._by_name = parameters
        self._weights = TwoWeights(parameters)
        if torch._C._current_graph_task_id() != -1:  # the plan changes at the end of a backward
            self._means = [parameter.grad for parameter in parameters.values()]
            added = ModelHook(self, DelayedSchedule._forget_means)
            for parameter in parameters.values():
                with hookable(parameter):
                    self._adds.append(parameter.register_post_accumulate_grad_hook(added))
        self._guard.remove()  # the model may have other modules now
        model, optimizer = self._model(), self._optimizer()
        acts = ModelHook(self, DelayedSchedule.settle), ModelHook(self, DelayedSchedule._walk)
        self._guard = SettleFirst(model, [optimizer] if optimizer is not None else [], *acts)
        if model is not None:
            with self._guard.passing():
                self._buffers = BuffersBeside(model, next(iter(parameters.values())).device)

    def let_go(self) -> Callable[[], None]:
        # other ranks need what this one still sends, also when its script has ended
        return partial(finish_quietly, self._under_way)

    def detach(self) -> None:
        self._forget_means()
        self._stepping.remove()
        for hook in self._hooks:
            hook.remove()
        self._guard.remove()

    # ---- what a script sees

    @told_to_all
    @outside_modes
    def settle(self) -> None:
        """The parameters hold the global weights, with all updates that the script asked for. Raises if the exchange failed,
        once: then they hold those of the last one that did not."""
        with self._guard.passing():
            self._weights.show_global()
            self._land()

    def _walk(self) -> None:
        """While a step computes, its own weights are right for what it computes of parameters, such as a penalty."""
        if not self._weights.computing:
            self.settle()

    @_disable_dynamo  # it copies weights, and may wait
    @outside_modes
    def on_forward(self, module: torch.nn.Module) -> None:
        show_for_forward(module, self._weights, self._reducer, self.settle)

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Gradients are this rank's own."""

    # ---- a step

    def _refuse_past(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raises StepStateError for a step of the script that is not `_step`: its gradients would be sent by nobody."""
        name = next((name for name, each in self._by_name.items() if each.grad is not None), None)
        if name is not None:
            kind = type(optimizer).__name__
            raise StepStateError(
                f"{kind}.step was taken or compiled before the delayed schedule began, and steps {name!r} past the schedule: "
                "nothing would be exchanged. Call optimizer.step() by its name in every step, or take or compile it after "
                "gw.parallelize. plan='auto' may begin the schedule later: give it schedules without 'delayed' then."
            )

    @partial(told_to_all, script_steps=True)
    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, whole: Whole) -> None:
        """Do the work of the script's `optimizer.step()`."""
        self._left_out.calls += 1
        self._reducer.lanes.check()
        check_gradients(self._by_name, optimizer)
        parameters = list(self._by_name.values())
        if self._has_means():
            with self._guard.passing():
                self._weights.update({index: parameter.grad for index, parameter in enumerate(parameters)}, lambda _: whole())
            return
        lend = has_local_update(optimizer) and not why_at_once(optimizer)
        with self._guard.passing(), self._weights.shown(lend):
            self._arrive_first()
            update = partial(step_later, optimizer, whole, snapshot(optimizer))
            self._launch([parameter.grad for parameter in parameters], BackwardState.DONE, update)
            if self._last_act or self._data.lands(self._reducer.step):
                self._land()
            else:
                self._weights.local_update(local_moves(optimizer, parameters, self._data))
        self._change_now()

    def _step_with_zeros(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A GradScaler left out a step: the gradients of this rank are not finite. Others step, and this one sends zeros."""
        if self._has_means():
            return  # of all ranks, which leave it out alike
        for parameter in self._by_name.values():
            parameter.grad = None
        optimizer.step()

    def _has_means(self) -> bool:
        """Whether the gradients are still those of the backward at whose end this schedule began. The schedule before exchanged
        and counted them; a second exchange would count twice."""
        means = self._means
        self._forget_means()
        same = len(means) == len(self._by_name) and all(m is p.grad for m, p in zip(means, self._by_name.values(), strict=True))
        return same and not self._weights.computing

    def _forget_means(self, *_: object) -> None:
        """The gradients are not means any more, or nobody asks."""
        self._means = []
        for hook in self._adds:
            hook.remove()
        self._adds = []

    def correcting(self) -> tuple[Exchange | None, float]:
        """See `Corrects`."""
        return self._of_corrections.correcting

    def drop_residuals(self) -> None:
        """See `Corrects`."""
        if (memory := self._of_corrections.memory) is not None:
            memory.drop()

    @property
    def _of_corrections(self) -> Corrections:
        assert self._corrections is not None
        return self._corrections

    def when_idle(self, act: Callable[[], None]) -> None:
        """See `PutsOff`."""
        if self._between:
            self._last_act = act
        else:
            act()

    def _change_now(self) -> None:
        """Call the function that `when_idle` put off, if there is one: nothing is under way then."""
        if self._last_act is not None and self._landed is not None:
            act, self._last_act = self._last_act, None
            self._reducer.control.close_step(self._landed[0], self._reducer.step)
            act()

    def send_nothing(self, state: BackwardState) -> None:
        """See `Launches`."""
        with self._guard.passing(), self._weights.shown(lend=False):
            self._arrive_first()
            self._launch([None] * len(self._by_name), state, None)
            self._land()
        self._change_now()

    def before_reset(self) -> bool:
        """See `Launches`. After a step that this rank left in the middle, all ranks forget that step and go on with the next."""
        left = self._weights.computing
        with suppress(StepStateError):
            self.settle()  # this rank may not know yet that a step is void
            if self._weights.computing and self._reducer.lanes.failure is None:  # else all ranks know it already
                self.send_nothing(BackwardState.LEFT)
                for parameter in self._by_name.values():
                    parameter.grad = None
        return left

    def after_reset(self) -> None:
        """See `Launches`."""
        self._weights.show_global(keep_local=False)
        self._weights.computing = False

    # ---- launching

    def on_begin(self) -> None:
        step = self._reducer.step
        self._corrections = self._of_corrections.at_step(step, keep=True)
        self._reducer.begin(self._corrections.exchange_of(step))
        self._buffers.send(self._reducer.lanes.data[0])

    @torch.no_grad()
    def _launch(self, gradients: Sequence[torch.Tensor | None], state: BackwardState, update: Update | None) -> None:
        """Begin the exchange of these gradients, after what is due of W. Raises what the optimizer does, when it has begun."""
        self.on_begin()
        reducer = self._reducer
        problem: BaseException | None = None
        for portion in self._portions():
            try:
                self._land_due(portion)
            except BaseException as error:  # other ranks wait for the gradients
                problem = error
                self._due.clear()
            for index in portion:
                reducer.put(index, gradients[index])
            filled = [reducer.names[index] for index in reducer.arrivals.came]
            self._of_corrections.add_residuals(reducer.running, filled)
            for index in portion:
                reducer.send(index)
        told = reducer.tell(state)
        self._under_way.append(Launched(reducer.running, told, self._buffers.sending, update))
        if problem is not None:
            raise problem

    def _portions(self) -> list[list[int]]:
        """The parameters that are landed and launched together: of a bucket, which takes more of the core but lets a wire that is
        behind begin at once, or all of them."""
        optimizer, behind = self._optimizer(), self._waited_s > _BEHIND_S
        if optimizer is None or not behind or self._data.flush or why_at_once(optimizer):
            return [list(range(len(self._reducer.slots)))]
        return by_bucket(self._reducer.running.plan, self._reducer.slots)

    # ---- landing

    def on_end(self, told: "Future[RankReports]") -> None:
        self._reducer.running.wait(others=[told, *self._buffers.sending])
        self._buffers.arrived(self._reducer.lanes.data[0])

    def on_closed(self, closed: Closed) -> None:
        """Steps of this schedule end when they land."""

    def _land(self) -> None:
        """Wait for the step under way, if there is one, and make W of its mean."""
        self._arrive()
        self._land_due(list(self._due))

    def _land_due(self, indices: Sequence[int]) -> None:
        """Apply the optimizer to the global weights W of these parameters, with the means that have arrived."""
        due = {index: self._due.pop(index) for index in indices if index in self._due}
        if due and self._update is not None:
            self._weights.update(due, self._update)

    @torch.no_grad()
    def _arrive(self) -> None:
        """Wait for the step under way, if there is one. Its mean is due then."""
        if not self._under_way:
            return
        launched, start = self._under_way[0], time.perf_counter()
        try:
            # all learn of a step that some left only when the next one is computed, and go on
            reports = self._reducer.hear(launched.told, self.on_end, leaving_is_void=False)
        except BaseException as error:
            # a step that is void has been taken back
            self._of_corrections.landed(counts=False, taken_back=isinstance(error, StepStateError))
            raise
        finally:
            # `let_go` keeps this list, and an error in it would keep the frames that it passed, this schedule among them
            self._under_way.clear()
        self._waited_s = exposed = time.perf_counter() - start
        self._take(launched, reports)
        self._buffers.put(self._reducer.group.rank)
        self._landed = (reports, exposed)
        self._reducer.counted(reports)
        self._reducer.observers.measured(StepReport(self._reducer.running.meters, exposed))

    def _take(self, launched: Launched, reports: RankReports) -> None:
        """The mean is due, but of parameters that no rank used."""
        left = [self._reducer.group.global_ranks[rank] for rank in reports.ranks_in(BackwardState.LEFT)]
        self._due, self._update = {}, None if left else launched.update
        for index, slot in enumerate(self._reducer.slots):
            self._due[index] = slot.view if index in reports.used and not left else None
            if self._due[index] is None:
                self._reducer.running.take_back(slot)
            else:
                slot.owed = None
        if left:
            warnings.warn(
                f"step {self._reducer.step} is void on all ranks: rank {left[0]} left it and called reset(). Nobody uses its "
                "gradients; training goes on with the next one.",
                stacklevel=2,
            )
        self._of_corrections.landed(counts=not left, taken_back=True)

    def _arrive_first(self) -> None:
        """Before a step is launched, on all ranks alike: wait for the one before it, and do what ranks do together then."""
        self._weights.computing = False
        self._arrive()
        if self._landed is not None:
            (reports, exposed), self._landed = self._landed, None
            self._reducer.control.close_step(reports, self._reducer.step)
            self._between = True
            self._reducer.observers.finished(exposed)
            self._between = False

    # ---- saving

    @property
    def untold(self) -> bool:
        """See `EndsLater`."""
        return self._landed is not None

    def weight_bytes(self) -> int:
        """See `CopiesWeights`."""
        return self._weights.nbytes

    def state(self) -> dict[str, torch.Tensor]:
        self.settle()
        memory = self._of_corrections.at_step(self._reducer.step, keep=True).memory
        corrections = memory.state() if memory is not None else {}
        return self._weights.state() | {CORRECTION + key: value for key, value in corrections.items()}

    def check(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        corrections, local = divided(state)
        if (memory := self._of_corrections.at_step(saved.step).memory) is not None:
            memory.check(corrections)
        elif corrections:
            raise ValueError(f"the state has {printable(next(iter(corrections)))} of corrections, and this plan makes none.")
        check_local(local, len(saved.weights), self._by_name)

    def load(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        corrections, local = divided(state)
        self._forget_means()
        self._weights.show_global(keep_local=False)
        self._weights.computing, self._landed = False, None
        self._corrections = self._of_corrections.at_step(self._reducer.step)
        if (memory := self._corrections.memory) is not None:
            if saved.own:
                memory.load(corrections)
            else:
                memory.take_over(memory.fitting(added_up(divided(each)[0] for each in saved.memory)))
        self._weights.take_local(local, saved.weights)


def check_gradients(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raises StepStateError for gradients that cannot be launched as they are."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise StepStateError(
                f"the gradient of {name!r} is sparse; gradwire sends dense gradients. Use Embedding(..., sparse=False)."
            )
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        raise StepStateError(
            f"a GradScaler lets this {type(optimizer).__name__} unscale gradients in its step, and the delayed schedule "
            "sends them before. Make the optimizer with fused=False."
        )
