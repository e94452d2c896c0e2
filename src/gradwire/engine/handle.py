"""The handle: what `parallelize` returns, and what keeps a model synchronised."""

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire.collectives import Group, Lane, Link, LinkError, Meter, SilentLink
from gradwire.collectives.streams import Mark
from gradwire.core.plan import Plan
from gradwire.engine.agreement import agree, broadcast_bytes
from gradwire.engine.assembly import Assembly, assemble
from gradwire.engine.buffers import ModelBuffers
from gradwire.engine.failure import RollCall
from gradwire.engine.hooks import ModelHook, leave_hooks_behind, tensors_in
from gradwire.engine.memory import added_up
from gradwire.engine.overlap import FirstGradient
from gradwire.engine.prepare import Prepared, facts, prepare
from gradwire.engine.registry import REGISTRY
from gradwire.engine.states import read_state, warn_of_lost, write_state
from gradwire.engine.stats import BucketStats, Stats, StepReport
from gradwire.engine.step import Backward
from gradwire.errors import PlanError, StepStateError
from gradwire.planner.policy import Policy

__all__ = ["Handle"]


class Handle:
    """Keeps the gradients of one model synchronised. Made by `gradwire.parallelize`.

    It lives as long as the model, whether or not it is kept, until `detach()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        prepared: Prepared,
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
        self._backward = Backward(group, control, roll_call, drift_check_steps)
        self._backward.on_finished = ModelHook(self, Handle._finished)
        self._model = weakref.ref(model)
        self._synchronise(model, prepared)
        self._broadcast([*model.parameters(), *model.buffers()], "rank 0's parameters and buffers at the start")
        leave_hooks_behind(model)
        self._module_hooks = [
            model.register_forward_pre_hook(ModelHook(self, Handle._before_forward)),
            model.register_forward_hook(ModelHook(self, Handle._after_forward)),
        ]

    # ---- what the user calls

    @property
    def plan(self) -> Plan:
        """The plan that is executed. One made from a policy is made again after the first step, when the order in which
        gradients become ready is known."""
        return self._plan

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate into `grad`; the first one outside synchronises the sum, as under DDP."""
        before, self._backward.synchronise = self._backward.synchronise, False
        try:
            yield
        finally:
            self._backward.synchronise = before

    def stats(self) -> Stats:
        """What happened so far on this rank. Needs no other rank."""
        buckets, reports = self._executor.buckets, list(self._reports)
        of_buckets = tuple(BucketStats.of(buffers, self._group.grid) for buffers in buckets)
        return Stats(
            steps=self._backward.step,
            wire_bytes=sum(each.wire_bytes for each in of_buckets),
            intra_bytes=sum(each.intra_bytes for each in of_buckets),
            inter_bytes=sum(each.inter_bytes for each in of_buckets),
            gradient_bytes=sum(b.flat.numel() * b.flat.element_size() for b in buckets),
            exposed_us=1e6 * statistics.median([r.exposed_s for r in reports]) if reports else 0.0,
            before_first_gradient=self._first_gradient.median,
            codec_us=1e6 * statistics.median([r.codec_s for r in reports]) if reports else 0.0,
            buckets=of_buckets,
        )

    def time_codec(self, repeats: int = 5) -> float:
        """CPU seconds that one step's encodes and decodes take when nothing else runs: the median of `repeats`.

        Sends nothing. Call it between steps; gradients and residuals are as before afterwards.
        """
        link: Any = SilentLink(self._group)
        seconds = []
        with self._memory.kept(), _kept(self._flats()):
            for _ in range(repeats):
                meter = Meter()
                for task in sorted((t for tasks in self._executor.tasks for t in tasks), key=lambda t: t.phase):
                    scheme = self._executor.buckets[task.bucket].chunks[task.chunk]
                    scheme.post(link, 0)
                    scheme.run(task.phase, link, meter, None)
                seconds.append(meter.codec_seconds)
        return statistics.median(seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's step, plan and residuals, keys `rank{r}/...`, safe for torch.distributed.checkpoint.

        Of the plan it holds what a policy makes it from again, and its digest. The tensors are copies.
        """
        step, memory = self._backward.step, self._memory.state()
        return write_state(self._group, step, self._order, self._plan.state_digest(), memory)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up where `state_dict` was made. Between steps, on every rank; nothing is sent.

        With the same ranks pass at least this rank's own state, and run the same plan or policy: the run goes on bit for bit
        (with another `residual_dtype`, but for rounding). With another number of ranks pass the states of all ranks that
        saved, in one dictionary: their residuals are dealt out so that the sum is kept. A rank whose state is missing begins
        with zero residuals, with a warning that names what is lost.

        Raises ValueError naming what is missing or does not fit; the handle is as before then.
        """
        saved = read_state(state, self._group)
        if sorted(saved.order) != sorted(self._order):
            raise ValueError(
                f"the state's order numbers {len(saved.order)} tensors, not each of the {len(self._order)} trainable ones of "
                "the model once: it was saved with another model, or other parameters of it were frozen."
            )
        plan = self._plan if self._policy is None else self._plan_of(self._policy, saved.order)
        if saved.own and saved.plan != plan.state_digest():
            raise ValueError(
                f"the state was saved under plan {saved.plan[:16]}, and this handle runs plan {plan.state_digest()[:16]}: shards "
                "and residuals lie elsewhere. Parallelize with the policy or the plan of the run that saved it."
            )
        usable = plan == self._plan and not self._built.outdated(saved.step)
        built = self._built if usable else self._assemble(plan, saved.step)
        carried: dict[str, torch.Tensor] = {}
        if saved.own:
            built.memory.check(saved.memory[0])
        else:
            carried = added_up(saved.memory)
            built.memory.check_carried(carried)
            warn_of_lost(saved.missing, built.memory.names())
        self._order, self._order_known = saved.order, self._policy is not None
        self._use(built)
        if saved.own:
            self._memory.load(saved.memory[0])
        else:
            self._memory.take_over(carried)
        self._backward.step = saved.step

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
        self._broadcast_buffers(None)  # ranks whose model did not change do so before the step that is void then
        self._backward.announce_change()
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
            raise self._backward.broken("all ranks to compare their changed models", error) from error
        if problem is not None:
            raise problem
        assert prepared is not None
        carried = self._memory.carried()
        REGISTRY.forget(model, self._parameters.values())
        self._synchronise(model, prepared)
        REGISTRY.add(model, self._parameters.values(), self)
        self._memory.take_over(self._memory.fitting(carried))
        self._broadcast([*model.parameters(), *model.buffers()], "rank 0's parameters and buffers after a change")

    def reset(self) -> None:
        """Go on after a backward that a rank left in the middle, by an exception that its script caught. Collective.

        That rank calls it where it caught the exception; the others get StepStateError from their backward of that step and
        call it there. Gradients are dropped (`grad` is None) and the next backward is a step of its own. With error feedback
        what ranks had computed in the void step travels with the next one. Does nothing when nothing failed; raises the
        failure again when it is one that cannot be mended, such as a dead rank.

        Example::

            try:
                loss.backward()
            except (torch.OutOfMemoryError, gw.StepStateError):
                handle.reset()
                continue
        """
        self._backward.reset()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: wrap the training loop in it, on every rank.

        A rank whose loop has ended takes part in the steps of the others with zero gradients; means are still over all
        ranks. When the last one has ended, all get the parameters and buffers of the highest rank that trained last; the
        optimizer state of the others stays where their own loop ended. One forward and one backward a step.

        Example::

            with handle.join():
                for batch in loader:
                    model(batch).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        """
        self._backward.joining, self._backward.active = True, list(range(self._group.world_size))
        try:
            yield
            self._join_the_others()
        finally:
            self._backward.joining = False

    def flush(self) -> None:
        """Wait until nothing is under way. In the `backward` schedule nothing ever is between steps."""

    def detach(self) -> None:
        """Make the model an ordinary one again. Gradients are no longer synchronised."""
        for hook in self._module_hooks:
            hook.remove()
        self._backward.detach()
        for lane in [*self._lanes, self._control]:
            lane.stop()
        REGISTRY.forget(self._model(), self._parameters.values())

    # ---- inside

    def _synchronise(self, model: torch.nn.Module, prepared: Prepared) -> None:
        """From now on these parameters."""
        self._parameters, self._tensors, self._policy = prepared.parameters, prepared.tensors, prepared.policy
        self._owned = {id(parameter) for parameter in prepared.parameters.values()}
        # of a policy's plan: the guess that gradients come in the reverse order of registration
        self._order = list(range(len(prepared.tensors)))[::-1]
        self._order_known = False
        self._backward.watch(prepared.parameters)
        self._use(self._assemble(prepared.plan, self._backward.step))
        self._buffers = ModelBuffers(model, self._flats()[0].device)

    def _use(self, built: Assembly) -> None:
        self._built, self._plan = built, built.executor.plan
        self._executor, self._memory = built.executor, built.memory
        self._backward.attach(built.executor, built.random)

    def _flats(self) -> list[torch.Tensor]:
        return [buffers.flat for buffers in self._executor.buckets]

    def _finished(self, report: StepReport) -> None:
        self._buffers.due = True
        self._reports.append(report)
        self._first_gradient.ended(
            self._backward.first_gradient_s, time.perf_counter() - report.exposed_s, self._model()
        )
        if self._policy is not None and not self._order_known:
            self._plan_again(self._policy)
        elif self._built.outdated(self._backward.step):
            self._change_to(self._plan)

    def _plan_again(self, policy: Policy) -> None:
        """Buckets by the order in which rank 0's gradients came; what never came goes last."""
        came = self._backward.ready_order
        order = torch.tensor([*came, *sorted(set(range(len(self._tensors))) - set(came))])
        try:
            self._control.submit(partial(broadcast_bytes, tensors=[order])).result()
        except LinkError as error:
            raise self._backward.broken("the order in which rank 0's gradients came", error) from error
        self._order, self._order_known = order.tolist(), True
        plan = self._plan_of(policy, self._order)
        if plan != self._plan:
            self._change_to(plan)

    def _change_to(self, plan: Plan) -> None:
        """Run this plan from the next step on; nothing that is remembered is lost."""
        carried = self._memory.carried()
        self._use(self._assemble(plan, self._backward.step))
        self._memory.take_over(carried)

    def _assemble(self, plan: Plan, step: int) -> Assembly:
        return assemble(plan, self._parameters, self._group, self._lanes, step)

    def _plan_of(self, policy: Policy, order: list[int]) -> Plan:
        return policy.plan([self._tensors[index] for index in order], self._group.world_size)

    def _broadcast(self, tensors: list[torch.Tensor], what: str, root: int = 0) -> None:
        """The values of one rank of the group everywhere."""
        self._on_lane(partial(broadcast_bytes, tensors=tensors, root=root), what)

    def _on_lane(self, job: Callable[[Link], None], what: str) -> None:
        """Do something on the first lane that touches tensors of the model."""
        streams = self._lanes[0].link.streams
        ready = streams.mark()

        def run(link: Link) -> Mark:
            with link.streams.encoding(ready):
                job(link)
                return link.streams.mark()

        try:
            streams.wait(self._lanes[0].submit(run).result())
        except LinkError as error:
            raise self._backward.broken(what, error) from error
        except Exception as error:
            raise self._backward.failed_here(what, error) from error

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is not self._model() or not torch.is_grad_enabled() or not self._backward.may_send():
            return
        self._check_parameters(module)
        if not module.training:
            return  # an evaluation may run on one rank only
        self._broadcast_buffers(module)

    def _broadcast_buffers(self, module: torch.nn.Module | None) -> None:
        if (job := self._buffers.broadcast(module)) is not None:
            self._on_lane(job, "rank 0's buffers before forward")
        # in join() once a step, as ranks without a batch do
        self._buffers.due = self._backward.synchronise and not self._backward.joining

    def _join_the_others(self) -> None:
        """Take part in the steps of ranks that have more batches."""
        model, everybody = self._model(), list(range(self._group.world_size))
        if model is None:
            return
        last_active = self._backward.active
        while self._backward.active:
            last_active = self._backward.active
            self._broadcast_buffers(model)
            self._backward.run_out()
        if last_active != everybody:
            what = "the parameters of the rank that trained last"
            self._broadcast([*model.parameters(), *model.buffers()], what, root=last_active[-1])

    def _changed(self, module: torch.nn.Module) -> str | None:
        """The first trainable parameter that is not the one, or not of the kind, that the handle knows."""
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in self._owned:
                if not isinstance(parameter, torch.nn.Parameter):
                    return None  # torch.func.functional_call: others stand in for this one forward
                return next(repr(name) for name, p in module.named_parameters() if p is parameter)
        if self._buffers.changed(module):
            return "a buffer"
        return repr(name) if (name := self._backward.converted()) else None

    def _check_parameters(self, module: torch.nn.Module) -> None:
        if (name := self._changed(module)) is None:
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
        if module is self._model() and self._backward.synchronise and torch.is_grad_enabled():
            leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            self._first_gradient.expect(leaves)
            self._backward.expect_graph(leaves)


@contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
