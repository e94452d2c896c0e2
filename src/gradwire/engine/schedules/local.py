"""The `local` schedule (DiLoCo and its kin): ranks train alone, and average how far their weights went every so many steps.

W are the global weights, the same on all ranks. L are a rank's own, on which it computes (see docs/local_steps.md):

1. The script's optimizer steps L by this rank's own gradients. Nothing is sent. Adam's second moment is then made that of the
   mean gradient, as far as it can be estimated (`gradwire.engine.second_moment`).
2. After every H-th local step an exchange begins, a step of the reducer: the outer gradients W - L are copied to the flat
   buffers, and the lanes average them with the plan's specs. With several fragments each has its own time in the period.
3. `delay` local steps later the exchange ends: the outer optimizer has made W of the mean, and L takes up W.
4. Whoever looks at the weights in between sees W. That waits for an exchange under way, and changes nothing: the next training
   forward, or the next step, puts L back.

Compared with the `backward` schedule it needs one more copy of the weights (two while a script looks at them), one of the
gradients, and the outer optimizer's momentum.
"""

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from gradwire.core import LocalSteps, Nesterov, printable
from gradwire.engine.buffers import BuffersBeside
from gradwire.engine.control import BackwardState, RankReports
from gradwire.engine.prepare import Prepared, same_parameters
from gradwire.engine.reducer import Reducer, told_to_all
from gradwire.engine.schedules.base import Closed, TrainingJob, Traits
from gradwire.engine.schedules.weights import Launched, TwoWeights, by_bucket, check_local, finish_quietly, show_for_forward
from gradwire.engine.second_moment import lower_second_moments
from gradwire.engine.torch_hooks.hooks import ModelHook, StepHook
from gradwire.engine.torch_hooks.loss_scale import CountingHook
from gradwire.engine.torch_hooks.optimizer_step import own_steps
from gradwire.engine.torch_hooks.settling import SettleFirst
from gradwire.errors import GradwireError, PlanError, StepStateError
from gradwire.exchange import LOCAL, OUTER, Saved, StepReport, by_tensor, outside_modes


class LocalSchedule:
    """Steps of each rank's own, and an exchange of outer gradients every so many of them."""

    traits = Traits(sends_in_backward=False, sends_buffers=True, learns_order=False, trains_alone=True, weighs_batches=True)

    def __init__(self, reducer: Reducer, schedule: LocalSteps, job: TrainingJob) -> None:
        self._reducer, self._data = reducer, schedule
        _check_ranks(schedule, reducer.group.world_size)
        self._model = weakref.ref(job.model)
        self._local_steps = 0
        """How many this rank has made. The numbers of exchanges are counted by them."""
        self._under_way: list[Launched] = []
        """At most one."""
        self._arrived: tuple[RankReports, float] | None = None
        """The reports of an exchange that has arrived and whose W is not in L yet, and the seconds that were waited for it."""
        self._lands_after: int | None = None
        """The local steps after which L takes up the W of the last exchange, if it has not."""
        self._landing: list[int] = []
        """The parameters of the last exchange."""
        self._by_name: dict[str, torch.nn.Parameter] = {}
        self._watched = -1
        """Which of the reducer's parameters these are."""
        self._outer: OuterOptimizer | None = None
        self._warned = self._warned_of_parts = False
        self._counting = False
        """Whether a step is being counted: torch goes through the hooks of an optimizer, of which none may be removed."""
        self._put_off: Callable[[], None] | None = None
        """The function that `when_idle` was given meanwhile."""
        self._guard = SettleFirst(None, (), ModelHook(self, LocalSchedule.settle))
        before, after = StepHook(self, LocalSchedule._before_step), CountingHook(self, LocalSchedule._after_step)
        self._hooks = [optimizer.register_step_pre_hook(before) for optimizer in job.optimizers]
        if schedule.second_moment == "mean":
            lower = StepHook(self, LocalSchedule._lower_second_moments)
            self._hooks += [optimizer.register_step_post_hook(lower) for optimizer in job.optimizers]
        # with several optimizers a local step ends with the step of the last one
        self._hooks.append(job.optimizers[-1].register_step_post_hook(after))

    @staticmethod
    def check_optimizers(prepared: Prepared, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `ScheduleClass`."""
        schedule = prepared.plan.schedule
        assert isinstance(schedule, LocalSteps)
        schedule.fragments_of([1] * len(prepared.plan.buckets))
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_post_hooks"):
                raise PlanError(
                    f"{type(optimizer).__name__} has no step hooks, by which the local schedule counts local steps. Pass the "
                    "torch.optim.Optimizer itself, not what is wrapped around it."
                )

    def attach(self) -> None:
        reducer = self._reducer
        self._fragments = self._data.fragments_of(reducer.exchange.numels)
        of_ranks = self._data.steps_of_ranks
        part = of_ranks[reducer.group.rank] * len(of_ranks) / sum(of_ranks) if of_ranks else 1.0
        reducer.batches.watch_parts(self._data.fragments, part)
        if self._watched == reducer.watched:
            return
        self._watched = reducer.watched
        parameters = {name: p for name, p in zip(reducer.names, reducer.living(), strict=True) if p is not None}
        before, self._by_name = self._by_name, parameters
        local, momenta, same = dict[str, torch.Tensor](), dict[str, torch.Tensor](), same_parameters(before, parameters)
        if self._outer is None:
            self._local_steps = self._begins_after(reducer.step - 1)
        else:
            local, momenta = self._weights.kept_local(), self._outer.momenta
        landing = {name for index, name in enumerate(before) if index in self._landing} & same
        self._landing = [index for index, name in enumerate(parameters) if name in landing]
        self._weights: TwoWeights = TwoWeights(parameters, keeps_writes=True)
        self._weights.go_on_with({name: own for name, own in local.items() if name in same})
        self._outer = OuterOptimizer(self._data.outer, dict(zip(parameters, self._weights.copies, strict=True)))
        self._outer.take({name: momentum for name, momentum in momenta.items() if name in same})
        # ranks compare their global weights
        compared: list[Any] = [weakref.ref(weight) for weight in self._weights.copies]
        reducer.control.watch(reducer.names, compared)
        self._guard.remove()  # the model may have other modules now
        acts = ModelHook(self, LocalSchedule.settle), ModelHook(self, LocalSchedule._walk)
        self._guard = SettleFirst(model := self._model(), (), *acts)
        if model is not None:
            with self._guard.passing():
                self._buffers = BuffersBeside(model, next(iter(parameters.values())).device)

    def let_go(self) -> Callable[[], None]:
        # other ranks need what this one still sends, also when its script has ended
        return partial(finish_quietly, self._under_way)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._guard.remove()
        self._weights.show_global(keep_local=False)

    # ---- what a script sees

    @told_to_all
    @outside_modes
    def settle(self) -> None:
        """The parameters hold the global weights. Raises if the exchange under way failed, once."""
        with self._guard.passing():
            try:
                self._arrive()
            finally:
                self._weights.show_global()

    def _walk(self) -> None:
        """While a local step computes, the rank's own weights are right for what it computes of parameters, such as a penalty."""
        if not self._weights.computing:
            self.settle()

    @_disable_dynamo  # it copies weights, and may wait
    @outside_modes
    def on_forward(self, module: torch.nn.Module) -> None:
        trains = module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if trains and self._change_now():
            self._reducer.schedule.on_forward(module)
            return
        show_for_forward(module, self._weights, self._reducer, self.settle)

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Gradients are this rank's own."""

    # ---- a local step

    def _begins_after(self, exchange: int) -> int:
        """The local steps of this rank after which an exchange begins."""
        return self._data.begins_after(exchange, self._reducer.group.rank)

    @told_to_all
    def _before_step(self, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """An optimizer is about to step: the parameters hold L."""
        self._reducer.lanes.check()
        closure = named.get("closure") or (*given[1:], None)[0]  # torch gives the hook the optimizer twice
        if self._weights.show_local() and not self._weights.computing and closure is None and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer steps this rank's own weights by gradients that may be of the global weights: after something "
                "looked at the weights (state_dict(), eval(), parameters()) no training forward of the model came. Call "
                "model.train() before the forward, and the model itself, not its parts.",
                stacklevel=2,
            )
        if self._reducer.batches.is_empty:
            for parameter in self._by_name.values():
                parameter.grad = None  # of a batch without samples: a local step without an update

    def _lower_second_moments(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        lower_second_moments(optimizer, self._reducer.group.world_size, self._by_name.values())

    @told_to_all
    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with self._guard.passing(), self._putting_off():
            self._count_step()

    def _count_step(self) -> None:
        """A local step is over: land the last exchange and begin the next one, where their time has come."""
        self._weights.show_local()  # something may have looked since, or before a step that a GradScaler left out
        self._weights.computing = False
        if self._put_off is not None:
            self._drop_change()
        self._local_steps += 1
        self._reducer.batches.local_step()
        self._reducer.observers.local_step()
        if self._lands_after is not None and self._local_steps >= self._lands_after:
            self._land()
        due = self._lands_after is None and self._local_steps >= self._begins_after(self._reducer.step)
        if due and self._put_off is None:
            self._weights.show_local()
            self._launch(BackwardState.DONE)

    # ---- changes of the plan

    def when_idle(self, act: Callable[[], None]) -> None:
        """See `PutsOff`. What is put off comes before the next training forward."""
        if self._counting:
            self._put_off = act
        else:
            act()

    @contextmanager
    def _putting_off(self) -> Iterator[None]:
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _drop_change(self) -> None:
        """No training forward of the model came in the last local step: what was put off, for which exchanges wait, would never
        come."""
        self._put_off = None
        if not self._warned_of_parts:
            self._warned_of_parts = True
            warnings.warn(
                "a change from local steps to another schedule was dropped: it comes before a training forward of the model, and "
                "none came in a local step. The script calls parts of the model instead. Local steps go on. Call the model "
                "itself, or pass a plan of your own.",
                stacklevel=2,
            )

    def _change_now(self) -> bool:
        """Do what `when_idle` put off. Whether there was anything."""
        act, self._put_off = self._put_off, None
        if act is not None:
            act()
        return act is not None

    @torch.no_grad()
    def send_nothing(self, state: BackwardState) -> None:
        """See `Launches`. What this rank's last local steps changed is sent; after that its outer gradients are zero."""
        with self._guard.passing(), self._putting_off():
            self._weights.show_local()
            self._weights.computing = False
            if self._lands_after is not None:
                self._land()
            if sends := self._put_off is None:
                self._weights.show_local()
                self._local_steps = self._begins_after(self._reducer.step)
                self._launch(state)
                if self._lands_after is not None:
                    self._land()
        if self._change_now() and not sends:
            self._reducer.run_out()

    def before_reset(self) -> bool:
        """See `Launches`. A local step that this rank left in the middle counts, without an update: others have made one."""
        if not self._weights.computing:
            return False
        if self._reducer.lanes.failure is not None:
            self._local_steps += 1
            return True
        with suppress(StepStateError), self._guard.passing(), self._putting_off(), torch.no_grad():
            for parameter in self._by_name.values():
                parameter.grad = None
            self._count_step()
        return True

    def after_reset(self) -> None:
        """See `Launches`."""
        self._weights.computing = False

    # ---- an exchange

    def _fragment(self, exchange: int) -> list[list[int]]:
        """The parameters that the exchange of this number sends, together those of a bucket."""
        slots, buckets = self._reducer.slots, self._fragments[exchange % self._data.fragments]
        return [each for each in by_bucket(self._reducer.running.plan, slots) if slots[each[0]].bucket in buckets]

    def on_begin(self) -> None:
        reducer = self._reducer
        part = reducer.step % self._data.fragments
        reducer.begin(reducer.exchange, self._fragments[part], part)
        self._buffers.send(reducer.lanes.data[0])

    def _launch(self, state: BackwardState) -> None:
        """Begin the exchange of the outer gradients. The parameters hold L."""
        self.on_begin()
        reducer, parameters = self._reducer, list(self._by_name.values())
        fragment = self._fragment(reducer.step)
        self._landing = [index for bucket in fragment for index in bucket]
        reducer.batches.sent(reducer.step % self._data.fragments)
        for bucket in fragment:
            for index in bucket:
                reducer.put(index, self._weights.copies[index] - parameters[index])
            reducer.send(*bucket)
        self._under_way.append(Launched(reducer.running, reducer.tell(state), self._buffers.sending, None))
        self._lands_after = self._local_steps + self._data.delay
        if not self._data.delay:
            self._land()

    def on_end(self, told: "Future[RankReports]") -> None:
        self._reducer.running.wait(others=[told, *self._buffers.sending])
        self._buffers.arrived(self._reducer.lanes.data[0])

    def on_closed(self, closed: Closed) -> None:
        """Steps of this schedule end when they land."""

    @torch.no_grad()
    def _arrive(self) -> None:
        """Wait for the exchange under way, if there is one, and make W of its mean."""
        if not self._under_way:
            return
        launched, start = self._under_way[0], time.perf_counter()
        try:
            reports = self._reducer.hear(launched.told, self.on_end)
        except GradwireError as error:
            self._lands_after, count = None, self._data.fragments
            self._reducer.batches.not_sent(self._reducer.step % count)
            if count == 1:
                raise
            place = 1 + self._reducer.step % count
            raise type(error)(f"{error} The exchange was of fragment {place} of {count}.") from error
        finally:
            self._under_way.clear()
        exposed = time.perf_counter() - start
        assert self._outer is not None
        self._reducer.weigh(reports, self._landing)
        slots, names = self._reducer.slots, list(self._by_name)
        for index in self._landing:
            slots[index].owed = None
        self._outer.step({names[index]: slots[index].view for index in self._landing})
        self._buffers.put(self._reducer.group.rank)
        self._arrived = (reports, exposed)
        self._reducer.counted(reports)
        self._reducer.observers.measured(StepReport(self._reducer.running.meters, exposed))

    def _land(self) -> None:
        """End the last exchange, on all ranks after the same local step: L takes up its W. The parameters hold L."""
        self._arrive()
        self._lands_after = None
        parameters = list(self._by_name.values())
        for index in self._landing:
            if self._data.mixing == 1:
                parameters[index].copy_(self._weights.copies[index])
            else:
                parameters[index].lerp_(self._weights.copies[index], self._data.mixing)
        if self._arrived is not None:
            (reports, exposed), self._arrived = self._arrived, None
            self._reducer.control.close_step(reports, self._reducer.step)
            self._reducer.observers.finished(exposed)

    # ---- saving

    @property
    def untold(self) -> bool:
        """See `EndsLater`."""
        return self._arrived is not None

    def weight_bytes(self) -> int:
        """See `CopiesWeights`."""
        assert self._outer is not None
        return self._weights.nbytes + sum(momentum.nbytes for momentum in self._outer.momenta.values())

    def state(self) -> dict[str, torch.Tensor]:
        self.settle()
        assert self._outer is not None
        momenta = {f"{OUTER}0/{name}": value.reshape(-1).clone() for name, value in self._outer.momenta.items()}
        early = self._lands_after is None and self._due_to_land(self._reducer.step) > self._local_steps
        fields = {"local_steps": torch.tensor(self._local_steps)} | ({"landed": torch.tensor(1)} if early else {})
        return self._weights.state() | momenta | fields

    def _due_to_land(self, exchanges: int) -> int:
        """The local steps after which L takes up the W of the last of so many exchanges, at the latest; 0 without one."""
        return self._begins_after(exchanges - 1) + self._data.delay if exchanges else 0

    def check(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        check_local(by_tensor(state, LOCAL), len(saved.weights), self._by_name)
        if saved.local_steps is None:
            raise ValueError("the state has no local_steps: it is not of the local schedule. Use the schedule it was saved with.")
        assert self._outer is not None
        self._outer.check(by_tensor(state, OUTER))

    def load(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        assert self._outer is not None
        self._weights.computing, self._arrived, self._put_off = False, None, None
        last, lands = self._begins_after(saved.step - 1), self._due_to_land(saved.step)
        made = last if saved.local_steps is None else saved.local_steps
        lands_later = lands > made and not saved.landed
        # other ranks may have counted other steps, or in a schedule of another period: all begin a period then
        self._local_steps = made if saved.own else last
        self._lands_after = lands if saved.own and lands_later else None
        self._landing = [index for bucket in self._fragment(saved.step - 1) for index in bucket]
        # without the end of an exchange that had begun L would miss its W, and take it back with the next one
        self._weights.take_local(by_tensor(state, LOCAL) if saved.own or not lands_later else {}, saved.weights)
        self._outer.take(by_tensor(state if saved.own else saved.memory[-1], OUTER))


def _check_ranks(schedule: LocalSteps, ranks: int) -> None:
    """Raises PlanError if the schedule is for another number of ranks."""
    planned = len(schedule.steps_of_ranks)
    if planned not in (0, ranks):
        raise PlanError(
            f"steps_of_ranks has the local steps of {planned} ranks, and there are {ranks}. Give each rank its number, or leave "
            "it out."
        )


_BUFFER = "momentum_buffer"
"""The key under which torch's SGD keeps momentum."""


def length_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The Euclidean length of all elements together, added up in float64."""
    lengths: list[torch.Tensor] = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    length: torch.Tensor = torch.linalg.vector_norm(torch.stack(lengths))
    return length


class OuterOptimizer:
    """Torch's SGD over tensors that are no parameters of the model, inside a trust region if there is one."""

    def __init__(self, data: Nesterov, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._data = dict(weights), data
        self._sgd = torch.optim.SGD(list(self._weights.values()), lr=data.lr, momentum=data.momentum, nesterov=data.momentum > 0)
        if data.radius is not None:  # torch's other form adds momentum to the gradients themselves
            self._sgd.param_groups[0]["foreach"] = False

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Step these weights, in place."""
        chosen = [self._weights[name] for name in gradients]
        for weight, gradient in zip(chosen, gradients.values(), strict=True):
            weight.grad = gradient
        with own_steps():
            self._sgd.step()
        for weight in chosen:
            weight.grad = None
        if self._data.radius is not None and chosen:
            self._keep_near(chosen, list(gradients.values()), self._data.radius)

    @torch.no_grad()
    def _keep_near(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], radius: float) -> None:
        """Shorten the way from the mean of the local weights to these ones, which a step has just made.

        The mean is the weights before less the gradient g, and SGD took lr * (g + momentum * m) off. So the way is
        (1 - lr) * g - lr * momentum * m, and no copy of the weights before is needed.
        """
        rate, ways = self._data.lr, []
        for weight, gradient in zip(weights, gradients, strict=True):
            ways.append(gradient * (1 - rate))
            if (momentum := self._sgd.state[weight].get(_BUFFER)) is not None:
                ways[-1].sub_(momentum, alpha=rate * self._data.momentum)
        whole, away = torch.stack([length_of(gradients), length_of(ways)]).tolist()
        kept = radius * whole / (away or math.inf)
        if kept < 1:
            # in few digits, so that processors that add up in another order nearly always find the same
            digits, exponent = math.frexp(kept)
            torch._foreach_add_(weights, ways, alpha=math.ldexp(math.floor(digits * 1024) / 1024, exponent) - 1)

    @property
    def momenta(self) -> dict[str, torch.Tensor]:
        """The momentum of each weight that has been stepped."""
        kept = {name: self._sgd.state[weight].get(_BUFFER) for name, weight in self._weights.items()}
        return {name: value for name, value in kept.items() if value is not None}

    def check(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for momenta that are not of these weights."""
        for name, value in momenta.items():
            expected = self._weights.get(name)
            if expected is None or (value.numel(), value.dtype) != (expected.numel(), expected.dtype):
                kind = "no such tensor" if expected is None else f"{expected.numel()} elements of {expected.dtype}"
                raise ValueError(
                    f"the state has the outer momentum of {printable(name)}, {value.numel()} elements of {value.dtype}, and the "
                    f"model has {kind}. Pass what handle.state_dict() returned."
                )

    def take(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Go on with copies of these momenta; weights whose momentum is not here, or of another size, begin without."""
        for name, weight in self._weights.items():
            value = momenta.get(name)
            self._sgd.state[weight].pop(_BUFFER, None)
            if value is not None and value.numel() == weight.numel():
                self._sgd.state[weight][_BUFFER] = torch.empty_like(weight).copy_(value.reshape(weight.shape))
