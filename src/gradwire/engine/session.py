"""A session: one parallelized model, what it runs, and what becomes of both."""

import statistics
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from gradwire.core import Document, Plan, Spec, TensorInfo
from gradwire.engine.buffers import ModelBuffers, shared_tensors
from gradwire.engine.control import OwnSteps
from gradwire.engine.crossing import CROSSING, Whereabouts
from gradwire.engine.optimizer_state import OptimizerState
from gradwire.engine.prepare import Prepared, facts, prepare, same_parameters, what_changed
from gradwire.engine.reducer import (
    Observer,
    Observers,
    Reducer,
    announce_change,
    reset,
    scaled_too_far,
    taken_in_backward,
    told_to_all,
)
from gradwire.engine.registry import REGISTRY
from gradwire.engine.schedules.base import CopiesWeights, Corrects, PutsOff, ShardsOptimizer, TrainingJob
from gradwire.engine.schedules.factory import make_schedule, traits_of, why_not, why_not_weighed
from gradwire.engine.torch_hooks.hooks import GradientHooks, ModelHook, leave_hooks_behind, tensors_in
from gradwire.engine.torch_hooks.lazy_tensors import looking
from gradwire.engine.torch_hooks.loss_scale import LossScale
from gradwire.engine.torch_hooks.optimizer_step import PassedOptimizers, hear, hear_no_more
from gradwire.engine.torch_hooks.splitting import compiled_frames
from gradwire.engine.witness import Witness
from gradwire.errors import GradwireError, PlanError, StepStateError
from gradwire.exchange import Exchange, Saved, Stats, StepReport, outside_modes
from gradwire.plan import Policy
from gradwire.transport import Lane, Lanes, LanesObserver, Link, LinkError, MergedValues, agree, all_have, broadcast_bytes

_WATCHED_STEPS = 20
_MOST_BEFORE = 0.8
"""The largest part of backward before its first gradient that gets no warning."""


class FirstGradient:
    """Watches the first steps, and warns once where a model that was compiled as a whole leaves nothing to overlap."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self._began: float | None = None

    def expect(self, outputs: Iterable[torch.Tensor]) -> None:
        """A backward from these will follow."""
        self._began = None
        if len(self.shares) < _WATCHED_STEPS:
            for output in outputs:
                output.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    def ended(self, first_s: float, end_s: float, model: torch.nn.Module | None) -> None:
        """A step whose first gradient came at `first_s` and whose backward ended at `end_s` (time.perf_counter)."""
        if self._began is None or not self._began <= first_s <= end_s:
            return
        self.shares.append((first_s - self._began) / max(end_s - self._began, 1e-9))
        self._began = None
        if len(self.shares) == _WATCHED_STEPS and self.median > _MOST_BEFORE and model is not None and compiled(model):
            warnings.warn(
                f"{100 * self.median:.0f} % of backward passes before the first gradient is there, and nothing can be sent "
                "meanwhile: the model is compiled as a whole. Compile its blocks one by one to overlap communication: "
                "for block in model.blocks: block.compile().",
                stacklevel=2,
            )

    @property
    def median(self) -> float:
        """0 before the first step."""
        return statistics.median(self.shares) if self.shares else 0.0


def compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile made this module, or was asked to compile it in place."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


class _OwnParameters(NamedTuple):
    """The parameters of the model that an optimizer has, when they were looked for."""

    groups: int
    """The number of its groups then."""
    watched: int
    """How often the reducer had got parameters."""
    named: "list[tuple[str, weakref.ref[torch.nn.Parameter]]]"


class ScriptWatch:
    """Refuses steps inside backward and steps that nobody counts, warns of steps by gradients of the script's own, and scales
    residuals with the loss."""

    def __init__(self, reducer: Reducer, optimizers: Iterable[torch.optim.Optimizer], drift_check_steps: int) -> None:
        self._reducer, self._passed = reducer, PassedOptimizers(optimizers)
        self._own_steps = OwnSteps(drift_check_steps, reducer.group, reducer.lanes.name)
        self._stepped_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _OwnParameters] = weakref.WeakKeyDictionary()
        self.loss_scale = LossScale()
        hear(self)

    def stop(self) -> None:
        hear_no_more(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The script asks for a step of any optimizer of the process."""
        reducer, named = self._reducer, self._parameters_of(optimizer)
        if not named and optimizer not in self._passed:
            return  # it is of another model: in a thread of its own it may step while the job of this one begins or ends
        watched = bool(named) and reducer.synchronise
        if watched and torch._C._current_graph_task_id() != -1:
            raise taken_in_backward(reducer, named[0][0], type(optimizer).__name__)
        traits = reducer.schedule.traits
        if not traits.sends_in_backward:  # the weights of ranks differ until an exchange, which compares them
            word = reducer.exchange.plan.schedule.word if named else ""
            counts = f"the {word} schedule counts the steps of those that gw.parallelize got"
            living = ((name, of()) for name, of in named)
            cure = "call handle.detach(), and gw.parallelize again, on all ranks"
            self._passed.check(optimizer, living, counts, cure, others_train=traits.trains_alone)
        elif watched and (words := self._own_steps.step(reducer.parameters, reducer.names, reducer.step)):
            warnings.warn(words, stacklevel=4)

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> "list[tuple[str, weakref.ref[torch.nn.Parameter]]]":
        """The parameters of the model that the optimizer has, by name."""
        known, reducer = self._stepped_by.get(optimizer), self._reducer
        if known is None or known[:2] != (len(optimizer.param_groups), reducer.watched):
            has = {id(each) for group in optimizer.param_groups for each in group["params"]}
            named = [pair for pair in zip(reducer.names, reducer.parameters, strict=True) if id(pair[1]()) in has]
            known = self._stepped_by[optimizer] = _OwnParameters(len(optimizer.param_groups), reducer.watched, named)
        return known.named

    def begins(self, exchange: Exchange, settle: Callable[[], None]) -> None:
        """A backward begins, or a step of a rank without a batch. What was not sent yet of a loss of another scale takes up the
        new one. Raises StepStateError, on all ranks, if what a spec sends does not follow the scale."""
        control = self._reducer.control
        try:
            change = self.loss_scale.change(exchange.plan.specs, exchange if control.tells_scale else None)
        except StepStateError as error:
            raise scaled_too_far(self._reducer, str(error)) from None
        control.scaled = self.loss_scale.known
        if change.is_any:
            settle()
            exchange.residuals.follow(change.factor, change.left_out)

    def synchronised(self) -> None:
        """A synchronised backward has ended."""
        self._own_steps.synchronised()


class Driver(ABC):
    """Decides what a session runs, on all ranks alike."""

    later_specs: Sequence[Spec] = ()
    """Specs that may run when something is decided, in addition to those of the first policy."""

    def __init__(self) -> None:
        self.decisions = deque[Any](maxlen=100)
        """The last ones, in order."""
        self.decided = 0
        """The number of all so far."""

    def decide(self, decision: Any) -> None:
        """Keep a decision."""
        self.decisions.append(decision)
        self.decided += 1

    @property
    def searching(self) -> bool:
        """Whether the plan that runs is only being tried. A run which resumes is to decide anew, unless a plan is `chosen`."""
        return False

    @property
    def chosen(self) -> Plan | None:
        """The plan that a run which resumes is to go on with, where another one runs only to be compared with it."""
        return None

    @abstractmethod
    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """The policy that runs on so many ranks until something is decided."""

    @abstractmethod
    def finished(self, session: "Session") -> None:
        """A step counted; called at the end of its backward, on every rank. May change the session's plan."""

    @abstractmethod
    def recorded(self) -> Any:
        """The last decision, as the `Decision` of a recorded run."""

    def measurements(self) -> Mapping[str, Document] | None:
        """The profile, the cluster and the costs that it measured, by the names of their files; None if it measured none."""
        return None

    @abstractmethod
    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why it would not go on under a plan that was saved; '' if it would. own: what the policy it begins with makes."""

    def state(self, session: "Session") -> dict[str, torch.Tensor]:
        """Measurements that take several steps, as far as they are, as in `gradwire.exchange.states`."""
        return {}

    def check(self, session: "Session", saved: Saved) -> None:  # noqa: B027
        """Raises ValueError unless `resumed` can go on with the measurements that were saved."""

    def resumed(self, session: "Session", saved: Saved) -> None:  # noqa: B027
        """The session took up a saved state, and with it the plan that was saved."""

    def detached(self) -> None:  # noqa: B027
        """The session let go of the model."""


class GradientWatcher(Protocol):
    """Is called for each gradient."""

    def ready(self, index: int) -> None:
        """The gradient of the parameter with this number is ready."""
        ...


class ValueWatcher(GradientWatcher, Protocol):
    """Is called for each gradient, and gets this rank's value."""

    def coming(self, index: int, gradient: torch.Tensor | None) -> None:
        """The gradient of the parameter with this number has this value, before it is exchanged."""
        ...

    def resumed(self, index: int) -> None:
        """Backward goes on after it waited for the exchange of this gradient."""
        ...


class Session(Observer):
    """Keeps one model, its parameters, its plan and its reducer together.

    It is what the handle, the profiler, recordings and drivers work on. Between steps everything here may be read; what changes
    something is a method.
    """

    @outside_modes
    def __init__(
        self,
        model: torch.nn.Module,
        prepared: Prepared,
        optimizers: Sequence[torch.optim.Optimizer],
        lanes: Lanes,
        drift_check_steps: int,
    ) -> None:
        self.lanes, self.group = lanes, lanes.group
        self.driver: Driver | None = None
        """Who decides what is run; None where the user chose the plan."""
        self.reports: deque[StepReport] = deque(maxlen=100)
        """The reports of the last steps."""
        self.first_gradient = FirstGradient()
        self.began_s: float | None = None
        """When the first training forward since the last step's end began (time.perf_counter)."""
        self.inputs = 0
        """Elements of the inputs of training forwards since the last step's end."""
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._compiled_before = compiled_frames()
        self._model = weakref.ref(model)
        self.reducer = Reducer(lanes, drift_check_steps)
        self.reducer.observers.add(self)
        self.witness = Witness(self)
        """Measures what encodes do to gradients."""
        self.reducer.observers.add(self.witness)
        with lanes.leaving_with_reason():
            job = TrainingJob(model, optimizers, self._compiled_before)
            self.schedule = make_schedule(self.reducer, prepared.plan.schedule, job)
            self.reducer.use(self.schedule)
            self._whereabouts = Whereabouts(self.reducer, type(model).__name__)
            self._script = ScriptWatch(self.reducer, optimizers, drift_check_steps)
            self._synchronise(model, prepared)
        self._share(model, "rank 0's parameters and buffers at the start")
        leave_hooks_behind(model)
        self._module_hooks = [
            model.register_forward_pre_hook(ModelHook(self, Session._before_forward), with_kwargs=True),
            model.register_forward_hook(ModelHook(self, Session._after_forward)),
        ]
        if lanes.queues:
            self._module_hooks.append(model.register_state_dict_pre_hook(ModelHook(self, Session._before_state_dict)))

    # ---- what it runs

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, as long as it lives."""
        return self._model()

    @property
    def plan(self) -> Plan:
        return self.exchange.plan

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that `parallelize` was given and that are still there."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    @property
    def step(self) -> int:
        """The number of steps that counted so far."""
        return self.reducer.step

    @property
    def last_exchange(self) -> Exchange:
        """The exchange that ran the last step."""
        return self.reducer.running

    @property
    def next_step(self) -> int:
        """The number of the step of the next forward."""
        return self.reducer.next_step

    @property
    def synchronises(self) -> bool:
        """Whether the next backward sends gradients."""
        return self.reducer.synchronise

    @property
    def observers(self) -> Observers:
        return self.reducer.observers

    @property
    def active(self) -> list[int]:
        """The ranks that had a batch in the last step."""
        return self.reducer.active

    @property
    def searching(self) -> bool:
        """Whether plans are being tried, so that steps are not alike."""
        return self.driver is not None and self.driver.searching

    @property
    def first_gradient_s(self) -> float:
        """The moment when the step's first gradient became ready (time.perf_counter); 0 if none was seen."""
        return self.reducer.first_gradient_s

    def watch_gradients(self, watcher: "GradientWatcher") -> Callable[[], None]:
        """Call watcher.ready(index) when the gradient of a parameter, numbered as `tensors` are, becomes ready, as long as the
        watcher lives. Returns what ends this."""
        return GradientHooks(watcher, None, lambda each, index, *_: each.ready(index), self.parameters.values()).remove

    def watch_values(self, watcher: "ValueWatcher") -> Callable[[], None]:
        """Call the watcher as `watch_gradients` does, and with this rank's value before that."""

        def coming(each: ValueWatcher, index: int, parameter: torch.nn.Parameter) -> None:
            each.coming(index, parameter.grad)

        return GradientHooks(watcher, coming, lambda each, index, *_: each.ready(index), self.parameters.values()).remove

    def watch_tasks(self, observer: LanesObserver) -> Callable[[], None]:
        """Give the observer the times of the lanes' tasks. Returns what ends this."""
        self.lanes.observe(observer)
        return partial(self.lanes.observe, observer, on=False)

    def settle(self) -> None:
        """Wait until nothing is under way and all that a script can see is as it should be. Launches nothing."""
        self.schedule.settle()

    def plan_of(self, policy: Policy, order: Sequence[int] | None = None) -> Plan:
        """The plan that a policy makes of the tensors, in this order or in the order in which their gradients become ready. The
        same on all ranks."""
        tensors = [self.tensors[index] for index in (self.order if order is None else order)]
        return policy.plan(tensors, self.group.world_size, self.group.grid.ranks_per_node_if_even)

    def why_not(self, plan: Plan) -> str:
        """Why the plan's schedule cannot run with this rank's optimizers, or gains nothing with them; '' if it can."""
        model = self._model()
        assert model is not None
        prepared = Prepared(self.parameters, self.tensors, plan, None)
        if self.reducer.batches.used and (problem := why_not_weighed(plan)):
            return problem
        if self._script.loss_scale.known and not traits_of(plan.schedule).sends_in_backward:
            return (
                "a GradScaler scales the loss, and each rank would leave out steps by its own gradients: then scales differ, and "
                "schedules that send scaled gradients could not run again"
            )
        return why_not(prepared, TrainingJob(model, self.optimizers, self._compiled_before))

    def change_to(self, plan: Plan) -> None:
        """Run this plan from the next step on; nothing that is remembered is lost. Another schedule begins when no step of the
        present one is in hand. Raises PlanError, and changes nothing, for what this version cannot run."""
        self.settle()
        take_up = partial(self._take_up, self.assemble(plan, self.reducer.step))
        if plan.schedule != self.plan.schedule and isinstance(self.schedule, PutsOff):
            self.schedule.when_idle(take_up)
        else:
            take_up()

    def _take_up(self, exchange: Exchange) -> None:
        if traits_of(exchange.plan.schedule).trains_alone == self.schedule.traits.trains_alone:
            exchange.residuals.take_over(self.exchange.residuals.carried())  # else changes of weights, and gradients: other units
        self.use(exchange)

    def use_specs_of_now(self) -> None:
        """Between two steps: run the next one with its own specs, where some begin or end with it."""
        if self.exchange.outdated(self.reducer.step):
            self.change_to(self.plan)

    def assemble(self, plan: Plan, step: int) -> Exchange:
        """An exchange that runs a plan from this step on."""
        return Exchange.on(self.lanes, self.parameters, plan, step, in_place=plan.schedule.lends_gradients)

    def use(self, exchange: Exchange, others: bool = False) -> None:
        """Run this exchange from now on. `others`: with other parameters, which the reducer does not know."""
        if isinstance(self.schedule, ShardsOptimizer):
            self.schedule.check_exchange(exchange)
        before = self.plan.schedule if "exchange" in vars(self) else None
        if before is not None and exchange.plan.schedule != before:
            model = self._model()
            assert model is not None
            self.reducer.detach()
            job = TrainingJob(model, self.optimizers, self._compiled_before)
            self.schedule, others = make_schedule(self.reducer, exchange.plan.schedule, job), True
            self.reducer.use(self.schedule)
        if others:
            self.reducer.watch(self.parameters)
        self.exchange = exchange
        self.reducer.attach(exchange)
        if before is not None and traits_of(before).trains_alone and not self._own_states(exchange.plan):
            self._send_optimizer_state()

    @outside_modes
    def drop_residuals(self) -> None:
        """See `Handle.drop_residuals`."""
        self.settle()
        self.exchange.residuals.drop()
        if isinstance(self.schedule, Corrects):
            self.schedule.drop_residuals()

    @outside_modes
    def reset(self) -> None:
        """See `Handle.reset`."""
        if left := reset(self.reducer):
            self._buffers.due = True  # a rank that left while it accumulated did not come to the forward that others sent them in
        self._whereabouts.leave()
        self.began_s = None
        if not left and self.reducer.group.world_size > 1:
            warnings.warn(
                "reset() found no step to leave. If an exception came after backward, the other ranks step by the mean of that "
                "backward: call optimizer.step() here too, or weights differ. If it came earlier, the other ranks do not know "
                "that this one left a batch: ranks are one batch apart from now on, and wait for each other at the end. A step "
                "can be left where model.train() comes before the forward, and where the model itself is called, not its parts.",
                stacklevel=4,
            )

    def detach(self) -> None:
        """Leave the model as it was, and end the lanes."""
        self._script.stop()
        self._whereabouts.forget()
        for hook in self._module_hooks:
            hook.remove()
        if self.driver is not None:
            self.driver.detached()
        self.lanes.observe(self.witness, on=False)
        parent, misses_update = self.lanes.shared.forked_from, False
        try:
            self.settle()
        except GradwireError:  # a failure of the past was raised then
            misses_update = parent is not None and self.lanes.failure is None
        finally:  # also where somebody interrupts the wait
            self.reducer.detach()
            self.lanes.stop()
        if misses_update:
            warnings.warn(
                f"this process was forked from process {parent} while an exchange was under way, which does not arrive here. "
                "So some or all weights are those before the last update. Call handle.flush() in the parent before the fork.",
                stacklevel=3,
            )

    # ---- when the model changes

    @outside_modes
    def attach(self) -> None:
        """See `Handle.attach`."""
        model = self._model()
        if model is None:
            return
        if isinstance(self.schedule, ShardsOptimizer):
            self.schedule.check_parameters(model)
        self.settle()
        self._broadcast_buffers(None)  # ranks whose model did not change do so before the step that is void then
        self.settle()
        announce_change(self.reducer)
        prepared, problem = None, None
        try:
            ranks, per_node = self.group.world_size, self.group.grid.ranks_per_node_if_even
            prepared = prepare(model, self.policy or self.plan, ranks, per_node, self.parameters.values())
            if (device := next(iter(prepared.parameters.values())).device) != self.device:
                raise PlanError(
                    f"the model moved from {self.device} to {device}; a handle works on one device. Call its "
                    "detach() and parallelize again."
                )
        except Exception as error:
            problem = error
        told = facts(None if problem else prepared, problem)
        with self.lanes.told("all ranks to compare their changed models", self.reducer.step):
            self.lanes.control.submit(partial(agree, facts=told, global_ranks=self.group.global_ranks)).result()
        if problem is not None:
            raise problem
        assert prepared is not None
        self._take_in(model, prepared)
        self._share(model, "rank 0's parameters and buffers after a change")

    @told_to_all
    def _take_in(self, model: torch.nn.Module, prepared: Prepared) -> None:
        """Synchronise the model as it is after a change, on which ranks have agreed."""
        if self.schedule.traits.keeps_parameters:
            self._buffers = ModelBuffers(model, self.device)
        else:
            carried, before, alone = self.exchange.residuals.carried(), self.parameters, self.schedule.traits.trains_alone
            handle = REGISTRY.forget(model, before.values())
            self._synchronise(model, prepared)
            REGISTRY.add(model, self.parameters.values(), handle)
            kept = same_parameters(before, self.parameters)
            carried = {key: value for key, value in carried.items() if key.split("/", 1)[1] in kept}
            if self.schedule.traits.trains_alone == alone:  # changes of weights and gradients have other units
                self.exchange.residuals.take_over(self.exchange.residuals.fitting(carried))

    def _synchronise(self, model: torch.nn.Module, prepared: Prepared) -> None:
        """Synchronise these parameters from now on."""
        self.parameters, self.tensors, self.policy = prepared.parameters, prepared.tensors, prepared.policy
        self._owned = {id(parameter) for parameter in prepared.parameters.values()}
        # of a policy's plan: the guess that gradients come in the reverse order of registration
        self.order = list(range(len(prepared.tensors)))[::-1]
        self.order_known = False
        self.use(self.assemble(prepared.plan, self.reducer.step), others=True)
        self._buffers = ModelBuffers(model, self.device)

    @property
    def device(self) -> torch.device:
        return self.exchange.flats[0].device

    def ride(self, values: MergedValues) -> Callable[[], MergedValues | None]:
        """See `RidesControl`."""
        return self.reducer.control.ride(values)

    # ---- what recordings read

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        return type(self._model()).__name__

    @property
    def records(self) -> bool:
        """Whether this rank writes records."""
        return self.group.rank == 0

    running = True
    """There is always a plan and an exchange."""
    predicted_us: Mapping[str, float] = MappingProxyType({})
    """No exchange is predicted alone: buckets overlap."""

    def stats(self) -> Stats:
        """Return statistics of this rank so far. Needs no other rank."""
        exchange, reports, schedule, driver = self.exchange, list(self.reports), self.schedule, self.driver
        correcting, part = schedule.correcting() if isinstance(schedule, Corrects) else (None, 0.0)
        of_buckets = self.witness.of_buckets(exchange.bucket_stats(correcting, part))
        codec_us = 1e6 * statistics.median([r.codec_s for r in reports]) if reports else 0.0
        of_exchange = exchange.stats_of_steps(self.reducer.step, of_buckets, codec_us)
        weights = schedule.weight_bytes() if isinstance(schedule, CopiesWeights) else 0
        memory = msgspec.structs.replace(of_exchange.memory, weight_bytes=weights)
        return Stats(
            **{field.name: getattr(of_exchange, field.name) for field in fields(of_exchange)} | {"memory": memory},
            exposed_us=1e6 * statistics.median([r.exposed_s for r in reports]) if reports else 0.0,
            before_first_gradient=self.first_gradient.median,
            decisions=tuple(driver.decisions) if driver is not None else (),
            decided=driver.decided if driver is not None else 0,
        )

    # ---- after a step

    def measured(self, report: StepReport) -> None:
        self.reports.append(report)

    def finished(self, exposed_s: float) -> None:
        self._script.synchronised()
        self._whereabouts.since = None
        self._buffers.due = True
        self.first_gradient.ended(self.reducer.first_gradient_s, time.perf_counter() - exposed_s, self._model())
        if self.policy is not None and not self.order_known and self.schedule.traits.learns_order:
            self._plan_again(self.policy)
        else:
            self.use_specs_of_now()
        if self.driver is not None:
            self.driver.finished(self)
        self.began_s, self.inputs = None, 0

    def _plan_again(self, policy: Policy) -> None:
        """Make the plan again, with tensors in the order in which rank 0's gradients came; tensors without a gradient go last."""
        came = self.reducer.ready_order
        order = torch.tensor([*came, *sorted(set(range(len(self.tensors))) - set(came))])
        with self.lanes.told("the order in which rank 0's gradients came", self.reducer.step):
            self.lanes.control.submit(partial(broadcast_bytes, tensors=[order])).result()
        guessed, self.order, self.order_known = self.order, order.tolist(), True
        if self.order == guessed:
            return
        plan = self.plan_of(policy)
        if plan != self.plan:
            self.change_to(plan)

    # ---- what ranks do together, apart from gradients

    def _share(self, model: torch.nn.Module, what: str) -> None:
        """Give all ranks rank 0's parameters and buffers, and its optimizers' state where all step by the same gradients. Most
        scripts begin with the same ones on all ranks, by a seed or a checkpoint: then only checksums are sent. On devices, and
        without C++, those of parameters take too long."""
        self.settle()
        tensors, compares = shared_tensors(model), self.device.type == "cpu" and not self.group.met.why_no_wires()
        parts, same = [tensors if compares else [], self._compared_state()], list[bool]()
        self._on_lane(lambda link: same.extend(all_have(link, *parts)), what, self.lanes.control)
        if not (compares and same[0]):
            self._broadcast(tensors, what)
        if not same[1]:
            self._send_optimizer_state()

    def _compared_state(self) -> list[torch.Tensor]:
        """The state of this rank's optimizers, as ranks compare it; nothing where each rank has its own."""
        return [] if self._own_states(self.plan) else self._optimizer_state().compared()

    @staticmethod
    def _own_states(plan: Plan) -> bool:
        """Whether the state of optimizers is each rank's own."""
        return traits_of(plan.schedule).trains_alone or plan.shards_optimizer

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.optimizers, list(self.parameters.values()))

    def _send_optimizer_state(self, root: int = 0) -> None:
        """Give all ranks the state of the optimizers of one rank of the group."""
        what = f"the state of rank {self.group.global_ranks[root]}'s optimizers"

        def broadcast(tensors: list[torch.Tensor]) -> None:
            lane = self.lanes.control if tensors[0].device != self.device else None
            self._on_lane(partial(broadcast_bytes, tensors=tensors, root=root), what, lane)

        self._optimizer_state().send(broadcast, is_root=self.group.rank == root)

    def _broadcast(self, tensors: list[torch.Tensor], what: str, root: int = 0) -> None:
        """Give all ranks the values of one rank of the group."""
        self.settle()
        self._on_lane(partial(broadcast_bytes, tensors=tensors, root=root), what)

    def _on_lane(self, job: Callable[[Link], None], what: str, lane: Lane | None = None) -> None:
        """Run a job on tensors of the model on this lane. None: the first one; on the CPU the control lane, if the first one may
        be busy."""
        busy = self.device.type == "cpu" and self.schedule.traits.lanes_busy_between_steps
        lane = lane or (self.lanes.control if busy else self.lanes.data[0])
        self._whereabouts.enter()
        try:
            self.lanes.run(lane, job)
            self._whereabouts.leave(beside=True)
        except LinkError as error:
            raise self.lanes.broken(what, error, self.reducer.step) from error
        except Exception as error:
            raise self.lanes.failed_here(what, error, self.reducer.step) from error

    def _before_state_dict(self, *arguments: Any) -> None:
        """A checkpoint holds no step whose sums never arrived."""
        self.lanes.check_queued()

    @told_to_all
    def _on_forward(self, module: torch.nn.Module) -> None:
        self.schedule.on_forward(module)

    def _before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module is not self._model():
            return
        self._on_forward(module)
        if torch.is_grad_enabled() and self.reducer.may_send():
            self._check_parameters(module)  # where torch.compile stops tracing, before it comes to a clock
            CROSSING.uses()
            self.lanes.use_here()
            if module.training and self.began_s is None:
                self.began_s = time.perf_counter()
            if self.driver is not None and module.training:
                self.inputs += sum(tensor.numel() for tensor in tensors_in((inputs, named)))
            if module.training:  # an evaluation may run on one rank only
                self._broadcast_buffers(module)
            # what other ranks wait for next is this rank's backward, or inside no_sync() the last one of this step
            self.reducer.arrivals.awaited = module.training

    def _broadcast_buffers(self, module: torch.nn.Module | None) -> None:
        if not self.schedule.traits.sends_buffers and (job := self._buffers.broadcast(module)) is not None:
            self._on_lane(job, "rank 0's buffers before forward")
        # in join() once a step, as ranks without a batch do
        self._buffers.due = self.reducer.synchronise and not self.reducer.control.joining

    def begins(self) -> None:
        """Ranks without a batch in join() send buffers before each step. If no training forward of the model has sent them here
        (the script trains in eval mode, or calls parts of the model), send them now. Residuals take up a new loss scale."""
        if self.reducer.control.joining and self._buffers.due:
            self._broadcast_buffers(self._model())
        self._whereabouts.since = time.monotonic()
        self._script.begins(self.exchange, self.settle)

    def join_the_others(self) -> None:
        """Take part in the steps of ranks that have more batches."""
        model, everybody = self._model(), list(range(self.group.world_size))
        if model is None:
            return
        self.settle()
        last_active = self.reducer.active
        # the means of steps without a batch are no gradients of this rank, and its next backward would add to them
        kept = [(each, None if each.grad is None else each.grad.clone()) for each in self.parameters.values()]
        while self.reducer.active:
            last_active = self.reducer.active
            self._broadcast_buffers(model)
            self._run_out()
        self.settle()
        for parameter, gradient in kept:
            parameter.grad = gradient
        if last_active != everybody:
            what, root = "the parameters of the rank that trained last", last_active[-1]
            self._broadcast(shared_tensors(model), what, root)
            if not self._own_states(self.plan):
                self._send_optimizer_state(root)

    def _run_out(self) -> None:
        """Make one step without a batch. Where ranks with a batch left it, and it is void, all ranks go on with the next one: no
        script is here to call `reset`."""
        try:
            self.reducer.run_out()
        except StepStateError:
            if not (self.reducer.left_by and self.lanes.mendable):
                raise
            self.reset()

    def _check_parameters(self, module: torch.nn.Module) -> None:
        with looking():
            name = what_changed(module, self._owned, self._buffers) or self.reducer.converted()
        if name is None:
            return
        if module.training:
            self.attach()
            self._on_forward(module)  # the step computes on the weights that were taken in
            return
        raise StepStateError(
            f"{name} was added, thawed, converted or replaced since the model was parallelized, and the model is in eval "
            "mode, where a forward may be one rank's alone. For training call the handle's attach() on all ranks, or "
            "model.train() first; for an evaluation use torch.no_grad()."
        )

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is self._model() and torch.is_grad_enabled():
            # a hook on what a forward made goes with its graph; on a parameter that the model returns it would stay
            made = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            if self.reducer.synchronise:
                self.first_gradient.expect(made)
            self.reducer.expect_graph(made)
