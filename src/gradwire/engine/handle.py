"""The handle: what `parallelize` returns, and what keeps a model synchronised."""

import statistics
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradwire.collectives import Group, Lane, Link, Meter, SilentLink
from gradwire.collectives.streams import Mark
from gradwire.core.plan import Plan
from gradwire.core.specs import QSGD, ErrorFeedback, Spec
from gradwire.core.tensors import TensorInfo
from gradwire.engine.agreement import broadcast_bytes
from gradwire.engine.executor import Executor
from gradwire.engine.failure import RollCall
from gradwire.engine.hooks import ModelHook, leave_hooks_behind
from gradwire.engine.layout import BucketBuffers, build_buckets
from gradwire.engine.residuals import Residuals
from gradwire.engine.step import Backward, StepReport
from gradwire.errors import StepStateError
from gradwire.planner.policy import Policy

__all__ = ["BucketStats", "Handle", "Stats"]


@dataclass(frozen=True)
class BucketStats:
    """One bucket: what it holds and what it sends."""

    tensors: tuple[str, ...]
    numel: int
    chunks: int
    wire_bytes: int
    """Bytes this rank sends for the bucket in a step."""


@dataclass(frozen=True)
class Stats:
    """What a handle did, for this rank."""

    steps: int
    """Synchronised steps so far."""
    wire_bytes: int
    """Bytes of payload this rank sends in a step, as planned. Frames, acknowledgements and the control exchange, of a
    bit a parameter and 41 bytes for each rank, come on top."""
    gradient_bytes: int
    """Bytes of the gradients themselves."""
    exposed_us: float
    """Median over the last 100 steps of the time that the end of backward waited for the exchange."""
    codec_us: float
    """Median of the CPU time of encodes and decodes in a step, lanes added up."""
    buckets: tuple[BucketStats, ...]


class Handle:
    """Keeps the gradients of one model synchronised. Made by `gradwire.parallelize`.

    It lives as long as the model, whether or not it is kept, until `detach()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: dict[str, torch.nn.Parameter],
        tensors: list[TensorInfo],
        plan: Plan,
        policy: Policy | None,
        group: Group,
        lanes: list[Lane],
        control: Lane,
        roll_call: RollCall,
        drift_check_steps: int,
    ) -> None:
        self._parameters, self._tensors, self._policy = parameters, tensors, policy
        self._owned = {id(parameter) for parameter in parameters.values()}
        self._group, self._lanes, self._control = group, lanes, control
        self._reports: deque[StepReport] = deque(maxlen=100)
        self._buffers_due = True
        self._backward = Backward(parameters, group, control, roll_call, drift_check_steps)
        self._backward.on_finished = ModelHook(self, Handle._finished)
        self._model = weakref.ref(model)
        # of a policy's plan: the guess that gradients come in the reverse order of registration
        self._order, self._order_known = list(range(len(tensors)))[::-1], False
        self._install(plan)
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
        buckets = self._executor.buckets
        reports = list(self._reports)
        return Stats(
            steps=self._backward.step,
            wire_bytes=sum(scheme.wire_bytes for b in buckets for scheme in b.chunks),
            gradient_bytes=sum(b.flat.numel() * b.flat.element_size() for b in buckets),
            exposed_us=1e6 * statistics.median([r.exposed_s for r in reports]) if reports else 0.0,
            codec_us=1e6 * statistics.median([r.codec_s for r in reports]) if reports else 0.0,
            buckets=tuple(
                BucketStats(b.bucket.tensors, b.flat.numel(), len(b.chunks), sum(s.wire_bytes for s in b.chunks))
                for b in buckets
            ),
        )

    def time_codec(self, repeats: int = 5) -> float:
        """CPU seconds that one step's encodes and decodes take when nothing else runs: the median of `repeats`.

        Sends nothing. Call it between steps; gradients and residuals are as before afterwards.
        """
        link: Any = SilentLink(self._group)
        seconds = []
        with self._residuals.kept(), _kept([b.flat for b in self._executor.buckets]):
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

        Of the plan it holds what a policy makes it from again, and its digest.
        """
        prefix = f"rank{self._group.global_ranks[self._group.rank]}"
        state = {
            f"{prefix}/step": torch.tensor(self._backward.step),
            f"{prefix}/order": torch.tensor(self._order),
            f"{prefix}/plan": torch.tensor(list(bytes.fromhex(self._plan.digest())), dtype=torch.uint8),
        }
        return state | {f"{prefix}/{key}": value for key, value in self._residuals.state().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up where `state_dict` was made, with the same plan or policy and world size. Between steps, on every
        rank. Other ranks' keys are left alone.

        Raises ValueError naming what is missing or does not fit.
        """
        prefix = f"rank{self._group.global_ranks[self._group.rank]}/"
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if missing := {"step", "order", "plan"} - own.keys():
            raise ValueError(
                f"the state has no {prefix}{min(missing)}: it holds {', '.join(sorted(state)[:3]) or 'nothing'}. It was "
                "saved by other ranks or is not a gradwire state. Pass what this rank's handle.state_dict() returned."
            )
        order = own.pop("order").tolist()
        if self._policy is not None and sorted(order) == sorted(self._order):
            self._plan_for(self._policy, order)
        saved, current = bytes(own.pop("plan").tolist()).hex(), self._plan.digest()
        if saved != current:
            raise ValueError(
                f"the state was saved under plan {saved[:16]}, and this handle runs plan {current[:16]}: shards and "
                "residuals lie elsewhere. Parallelize with the policy or the plan of the run that saved it."
            )
        step = int(own.pop("step"))
        self._residuals.load(own)
        self._backward.step = step

    def reset(self) -> None:
        """Go on after a backward that a rank left in the middle, by an exception that its script caught.

        Call it on all ranks; each waits for the others. That rank calls it where it caught the exception; the others
        get StepStateError from their backward of that step and call it there. Gradients are dropped (`grad` is None) and
        the next backward is a step of its own. With error feedback what ranks had computed in the void step travels with
        the next one. Does nothing when nothing failed; raises the failure again when it is one that cannot be mended,
        such as a dead rank.

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
        _REGISTRY.forget(self._model(), self._parameters.values())

    # ---- inside

    def _install(self, plan: Plan) -> None:
        device = next(iter(self._parameters.values())).device
        random = torch.zeros(len(plan.buckets), 2, 4, dtype=torch.int64, device=device)
        for index, bucket in enumerate(plan.buckets):
            random[index, :, 0] = _seed(bucket.spec_of(bucket.tensors[0]))
        random[:, 1, 2] = 1
        random[:, :, 3] = self._group.rank
        buckets: list[BucketBuffers] = build_buckets(plan, self._parameters, self._group, random)
        self._plan, self._executor = plan, Executor(plan, buckets, self._lanes)
        self._residuals = Residuals(buckets, self._group.rank)
        self._backward.attach(self._executor, random)

    def _finished(self, report: StepReport) -> None:
        self._buffers_due = True
        self._reports.append(report)
        if self._policy is not None and not self._order_known:
            self._plan_again(self._policy)

    def _plan_again(self, policy: Policy) -> None:
        """Buckets by the order in which rank 0's gradients came; what never came goes last."""
        came = self._backward.ready_order
        order = torch.tensor([*came, *(i for i in range(len(self._tensors)) if i not in set(came))])
        try:
            self._control.submit(lambda link: link.broadcast(order).wait()).result()
        except RuntimeError as error:
            raise self._backward.broken("the order in which rank 0's gradients came", error) from error
        self._plan_for(policy, order.tolist())

    def _plan_for(self, policy: Policy, order: list[int]) -> None:
        """Run the policy's plan for gradients that come in this order."""
        self._order, self._order_known = order, True
        plan = policy.plan([self._tensors[index] for index in order], self._group.world_size)
        if plan != self._plan:
            carried = self._residuals.carried()
            self._install(plan)
            self._residuals.take_over(carried)

    def _broadcast(self, tensors: list[torch.Tensor], what: str, root: int = 0) -> None:
        """The values of one rank of the group everywhere."""
        streams = self._lanes[0].link.streams
        ready = streams.mark()

        def job(link: Link) -> Mark:
            with link.streams.encoding(ready):
                broadcast_bytes(link, tensors, root)
                return link.streams.mark()

        try:
            streams.wait(self._lanes[0].submit(job).result())
        except RuntimeError as error:
            raise self._backward.broken(what, error) from error

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is not self._model() or not torch.is_grad_enabled() or not self._backward.may_send():
            return
        self._check_parameters(module)
        if not module.training:
            return  # an evaluation may run on one rank only
        self._broadcast_buffers(module)
        # in join() once a step, as ranks without a batch do
        self._buffers_due = self._backward.synchronise and not self._backward.joining

    def _broadcast_buffers(self, module: torch.nn.Module) -> None:
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if buffers and self._buffers_due:
            self._broadcast(buffers, "rank 0's buffers before forward")

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

    def _check_parameters(self, module: torch.nn.Module) -> None:
        if all(id(p) in self._owned for p in module.parameters() if p.requires_grad):
            return
        names = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in self._owned]
        raise StepStateError(
            f"{names[0]!r} was not a trainable parameter of the model when it was parallelized (and {len(names) - 1} "
            "more): its gradient would stay this rank's own. load_state_dict(assign=True), thawing and added layers make "
            "such. Call the handle's detach() and parallelize again after them."
        )

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is self._model() and self._backward.synchronise and torch.is_grad_enabled():
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            self._backward.expect_graph(leaves)


class Registry:
    """Which models are parallelized. Keeps handles alive as long as their models."""

    def __init__(self) -> None:
        self.handles: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()
        self.owned = torch.utils.weak.WeakIdKeyDictionary()

    def add(self, model: torch.nn.Module, parameters: Any, handle: object) -> None:
        self.handles[model] = handle
        for parameter in parameters:
            self.owned[parameter] = True

    def forget(self, model: torch.nn.Module | None, parameters: Any) -> None:
        if model is not None:
            self.handles.pop(model, None)
        for parameter in parameters:
            self.owned.pop(parameter, None)


_REGISTRY = Registry()


def _seed(spec: Spec) -> int:
    inner = spec.inner if isinstance(spec, ErrorFeedback) else spec
    return inner.seed if isinstance(inner, QSGD) else 0


@contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
