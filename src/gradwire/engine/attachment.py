"""The half of a handle that follows its model: parameters, the plan they run, and what becomes of both."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.collectives import Group, Lane, Link, LinkError
from gradwire.collectives.streams import Mark
from gradwire.core.plan import Plan
from gradwire.engine.agreement import agree, broadcast_bytes
from gradwire.engine.assembly import Assembly, assemble
from gradwire.engine.buffers import ModelBuffers
from gradwire.engine.driven import Driven
from gradwire.engine.failure import RollCall
from gradwire.engine.hooks import ModelHook, leave_hooks_behind, tensors_in
from gradwire.engine.later import looking
from gradwire.engine.overlap import FirstGradient
from gradwire.engine.prepare import Prepared, facts, prepare, what_changed
from gradwire.engine.registry import REGISTRY
from gradwire.engine.schedules import steps_of, successor, why_not
from gradwire.engine.splitting import compiled_frames
from gradwire.engine.stats import StepReport
from gradwire.errors import PlanError, StepStateError
from gradwire.planner.policy import Policy

__all__ = ["Attachment"]


class Attachment(Driven):
    """Keeps one model, its parameters, buckets and steps together."""

    def __init__(
        self,
        model: torch.nn.Module,
        prepared: Prepared,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        lanes: list[Lane],
        control: Lane,
        roll_call: RollCall,
        drift_check_steps: int,
    ) -> None:
        self._group, self._lanes, self._control = group, lanes, control
        self._reports: deque[StepReport] = deque(maxlen=100)
        self._first_gradient = FirstGradient()
        self._order: list[int] = []
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._compiled_before = compiled_frames()
        self._began_s: float | None = None
        """When the first training forward since the last step's end began (time.perf_counter)."""
        self._model = weakref.ref(model)
        common = (group, control, roll_call, drift_check_steps)
        self._make_steps = partial(steps_of, common=common, compiled_before=self._compiled_before)
        self._steps = self._make_steps(prepared.plan.schedule, model, optimizers)
        self._schedule = prepared.plan.schedule
        self._steps.on_begin = ModelHook(self, Attachment._step_begins)
        self._steps.on_finished = ModelHook(self, Attachment._finished)
        self._steps.on_measured = self._reports.append
        self._synchronise(model, prepared)
        self._broadcast([*model.parameters(), *model.buffers()], "rank 0's parameters and buffers at the start")
        leave_hooks_behind(model)
        self._module_hooks = [
            model.register_forward_pre_hook(ModelHook(self, Attachment._before_forward)),
            model.register_forward_hook(ModelHook(self, Attachment._after_forward)),
        ]

    def attach(self) -> None:
        """Take in what became of the model's parameters: added layers, thawed or converted ones (`model.to(dtype)`), others
        in their place (`load_state_dict(assign=True)`). Collective.

        A training forward calls it by itself when it sees such a change; only a model that trains in eval mode, or by
        calling its parts, needs it. All ranks get rank 0's parameters and buffers. Residuals of tensors that stay are kept.

        Raises StepStateError on all ranks when not all of them came to it, DisagreementError when they changed
        differently, PlanError when the plan is a fixed one and does not fit.
        """
        model = self._model()
        if model is None:
            return
        self._steps.check_parameters(model)
        self._steps.flush()
        self._broadcast_buffers(None)  # ranks whose model did not change do so before the step that is void then
        self._steps.announce_change()
        prepared, problem = None, None
        try:
            prepared = prepare(model, self._policy or self._plan, self._group.world_size, self._parameters.values())
            if (device := next(iter(prepared.parameters.values())).device) != self._flats()[0].device:
                raise PlanError(
                    f"the model moved from {self._flats()[0].device} to {device}; a handle works on one device. Call its "
                    "detach() and parallelize again."
                )
        except Exception as error:
            problem = error
        told = facts(None if problem else prepared, problem)
        try:
            self._control.submit(partial(agree, facts=told, global_ranks=self._group.global_ranks)).result()
        except LinkError as error:
            raise self._steps.broken("all ranks to compare their changed models", error) from error
        if problem is not None:
            raise problem
        assert prepared is not None
        if self._steps.keeps_parameters:
            self._buffers = ModelBuffers(model, self._flats()[0].device)
        else:
            carried = self._memory.carried()
            REGISTRY.forget(model, self._parameters.values())
            self._synchronise(model, prepared)
            REGISTRY.add(model, self._parameters.values(), self)
            self._memory.take_over(self._memory.fitting(carried))
        self._broadcast([*model.parameters(), *model.buffers()], "rank 0's parameters and buffers after a change")

    def _synchronise(self, model: torch.nn.Module, prepared: Prepared) -> None:
        """From now on these parameters."""
        self._parameters, self._tensors, self._policy = prepared.parameters, prepared.tensors, prepared.policy
        self._owned = {id(parameter) for parameter in prepared.parameters.values()}
        # of a policy's plan: the guess that gradients come in the reverse order of registration
        self._order = list(range(len(prepared.tensors)))[::-1]
        self._order_known = False
        self._use(self._assemble(prepared.plan, self._steps.step), others=True)
        self._buffers = ModelBuffers(model, self._flats()[0].device)

    def _use(self, built: Assembly, others: bool = False) -> None:
        """Run this from now on. `others`: with other parameters, which the steps so far do not know."""
        self._steps.check_executor(built.executor)
        schedule = built.executor.plan.schedule
        if schedule != self._schedule:
            model = self._model()
            assert model is not None
            self._steps = successor(self._steps, partial(self._make_steps, schedule, model, self._living()))
            self._schedule, others = schedule, True
        if others:
            self._steps.watch(self._parameters)
        self._built, self._plan = built, built.executor.plan
        self._executor, self._memory = built.executor, built.memory
        self._steps.attach(built.executor, built.random)

    def _living(self) -> list[torch.optim.Optimizer]:
        """The optimizers that `parallelize` was given, those that are still there."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _why_not(self, plan: Plan) -> str:
        """Why the plan's schedule cannot run with this rank's optimizers, or gains nothing with them; '' if it can."""
        prepared = Prepared(self._parameters, self._tensors, plan, None)
        return why_not(prepared, self._model(), self._living(), self._compiled_before)

    def _flats(self) -> list[torch.Tensor]:
        return [buffers.flat for buffers in self._executor.buckets]

    def _finished(self, exposed_s: float) -> None:
        self._buffers.due = True
        self._first_gradient.ended(self._steps.first_gradient_s, time.perf_counter() - exposed_s, self._model())
        if self._policy is not None and not self._order_known and self._steps.learns_order:
            self._plan_again(self._policy)
        elif self._built.outdated(self._steps.step):
            self._change_to(self._plan)
        self._step_ended()
        self._began_s = None

    def _plan_again(self, policy: Policy) -> None:
        """Buckets by the order in which rank 0's gradients came; what never came goes last."""
        came = self._steps.ready_order
        order = torch.tensor([*came, *sorted(set(range(len(self._tensors))) - set(came))])
        try:
            self._control.submit(partial(broadcast_bytes, tensors=[order])).result()
        except LinkError as error:
            raise self._steps.broken("the order in which rank 0's gradients came", error) from error
        self._order, self._order_known = order.tolist(), True
        plan = self._plan_of(policy, self._order)
        if plan != self._plan:
            self._change_to(plan)

    def _change_to(self, plan: Plan) -> None:
        """Run this plan from the next step on; nothing that is remembered is lost. Another schedule begins when no step of the
        present one is in hand. Raises PlanError, and changes nothing, for what this version cannot run."""
        self._steps.flush()
        take_up = partial(self._take_up, self._assemble(plan, self._steps.step))
        if plan.schedule == self._schedule:
            take_up()
        else:
            self._steps.when_idle(take_up)

    def _take_up(self, built: Assembly) -> None:
        carried = self._memory.carried()
        self._use(built)
        self._memory.take_over(carried)

    def _assemble(self, plan: Plan, step: int) -> Assembly:
        return assemble(plan, self._parameters, self._group, self._lanes, step)

    def _plan_of(self, policy: Policy, order: list[int]) -> Plan:
        return policy.plan([self._tensors[index] for index in order], self._group.world_size)

    def _broadcast(self, tensors: list[torch.Tensor], what: str, root: int = 0) -> None:
        """The values of one rank of the group everywhere."""
        self._steps.flush()
        self._on_lane(partial(broadcast_bytes, tensors=tensors, root=root), what)

    def _on_lane(self, job: Callable[[Link], None], what: str) -> None:
        """Do something on a lane that touches tensors of the model: the first one, or on the CPU the control lane if that
        one may be busy."""
        on_cpu = self._flats()[0].device.type == "cpu"
        lane = self._control if on_cpu and self._steps.lanes_busy_between_steps else self._lanes[0]
        streams = lane.link.streams
        ready = streams.mark()

        def run(link: Link) -> Mark:
            with link.streams.encoding(ready):
                job(link)
                return link.streams.mark()

        try:
            streams.wait(lane.submit(run).result())
        except LinkError as error:
            raise self._steps.broken(what, error) from error
        except Exception as error:
            raise self._steps.failed_here(what, error) from error

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is not self._model():
            return
        self._steps.before_forward(module)
        if torch.is_grad_enabled() and self._steps.may_send():
            self._check_parameters(module)  # where torch.compile stops tracing, before it comes to a clock
            if module.training and self._began_s is None:
                self._began_s = time.perf_counter()
            if module.training:  # an evaluation may run on one rank only
                self._broadcast_buffers(module)

    def _broadcast_buffers(self, module: torch.nn.Module | None) -> None:
        if not self._steps.sends_buffers and (job := self._buffers.broadcast(module)) is not None:
            self._on_lane(job, "rank 0's buffers before forward")
        # in join() once a step, as ranks without a batch do
        self._buffers.due = self._steps.synchronise and not self._steps.joining

    def _step_begins(self) -> None:
        """In join(), ranks without a batch send buffers before each step: where no training forward of the model did, as in a
        loop in eval mode or one that calls parts of the model, they are sent now."""
        if self._steps.joining and self._buffers.due:
            self._broadcast_buffers(self._model())

    def _join_the_others(self) -> None:
        """Take part in the steps of ranks that have more batches."""
        model, everybody = self._model(), list(range(self._group.world_size))
        if model is None:
            return
        self._steps.flush()
        last_active = self._steps.active
        while self._steps.active:
            last_active = self._steps.active
            self._broadcast_buffers(model)
            self._steps.run_out()
        if last_active != everybody:
            what = "the parameters of the rank that trained last"
            self._broadcast([*model.parameters(), *model.buffers()], what, root=last_active[-1])

    def _check_parameters(self, module: torch.nn.Module) -> None:
        with looking():
            name = what_changed(module, self._owned, self._buffers) or self._steps.converted()
        if name is None:
            return
        if module.training:
            self.attach()
            return
        raise StepStateError(
            f"{name} was added, thawed, converted or replaced since the model was parallelized, and the model is in eval "
            "mode, where a forward may be one rank's alone. For training call the handle's attach() on all ranks, or "
            "model.train() first; for an evaluation use torch.no_grad()."
        )

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is self._model() and self._steps.synchronise and torch.is_grad_enabled():
            leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            self._first_gradient.expect(leaves)
            self._steps.expect_graph(leaves)
