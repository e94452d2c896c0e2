"""The `pipelined` schedule (DeAR): reduce phases in backward, gather phases beside the next forward.

A step in this schedule:
1. backward. Lanes run the reduce phases as buckets become ready. At its end the gate opens, and the lanes run the gather
   phases by themselves, in forward order, whatever the script does next.
2. `optimizer.step()` steps what need not wait, keeps the values of its groups for the rest, and returns.
3. Whoever first uses a gradient or a parameter of a bucket that is under way waits for this bucket; then its parameters are
   stepped. Usually that is the module that owns it, in the next forward.
4. `flush` waits for all buckets. The next backward does so before it begins, so at most one step is under way.

Nothing here launches an exchange: what is waited for comes, whichever rank waits.
"""

import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire.collectives import Group, Lane, LinkError
from gradwire.engine.control import Report
from gradwire.engine.executor import Executor
from gradwire.engine.failure import RollCall
from gradwire.engine.hooks import ModelHook
from gradwire.engine.later import is_later, looking, make_current, use_later
from gradwire.engine.settling import SettleFirst
from gradwire.engine.shard_norm import clip_coefficient, exact_shards, norm_over_ranks
from gradwire.engine.splitting import why_whole
from gradwire.engine.stats import StepReport
from gradwire.engine.step import Steps
from gradwire.engine.stepping import Groups, Stepping, outermost, snapshot, step_only

__all__ = ["Pipelined"]


@dataclass
class _LaterStep:
    """A step that the script asked for."""

    optimizer: torch.optim.Optimizer
    whole: Callable[[], Any]
    groups: Groups
    parameters: dict[int, list[torch.nn.Parameter]]
    """Those still to be stepped, by bucket."""


class Pipelined(Steps):
    """The steps of the pipelined schedule."""

    lanes_busy_between_steps = acts_before_gradients = True

    def __init__(
        self,
        group: Group,
        control: Lane,
        roll_call: RollCall,
        drift_check_steps: int,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        compiled_before: int,
    ) -> None:
        self._under_way: dict[int, None] = {}
        """Buckets that were not waited for yet, in launch order of their gathers."""
        self._not_used: dict[int, list[tuple[int, torch.Tensor | None]]] = defaultdict(list)
        """By bucket, parameters that no rank used, and what each had for a gradient."""
        self._later_steps: list[_LaterStep] = []
        self._said: set[str] = set()
        self._running_out = threading.Event()
        """Set while lanes run gathers that other ranks wait for."""
        self._exposed_s = 0.0
        self._scale: float | None = None
        """What gradients that are under way are multiplied with when they are there; None: as they are, and not clipped yet."""
        self._all_used = False
        """Whether in the last step every parameter was used on some rank."""
        # evaluations may run on threads of their own
        self._lock = threading.RLock()
        super().__init__(group, control, roll_call, drift_check_steps)
        self._model, self._compiled_before = weakref.ref(model), compiled_before
        self._stepping = Stepping(optimizers, self._step_asked_for)
        self._guard = SettleFirst(None, optimizers, ModelHook(self, type(self)._optimizer_is_seen))

    def _optimizer_is_seen(self) -> None:
        """A script is about to see or change the state of an optimizer."""
        self.flush()

    def attach(self, executor: Executor, random: torch.Tensor) -> None:
        super().attach(executor, random)
        last = {bucket: position for position, (bucket, _) in enumerate(executor.plan.launch)}
        self._order = sorted(last, key=last.__getitem__)
        assert self._release is not None
        self._release.detach()
        self._release = weakref.finalize(self, _let_go, executor, self._running_out)

    def detach(self) -> None:
        self._stepping.remove()
        self._guard.remove()
        self._forget()
        super().detach()

    def expect_graph(self, outputs: list[torch.Tensor]) -> None:
        super().expect_graph(outputs)
        for output in outputs:
            output.register_hook(ModelHook(self, Pipelined._backward_begins))

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """What is accumulated into must be there. Usually it is: forward waited for it, or there is no gradient."""
        self.flush()

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        # before saved tensors are used: a parameter stepped since then is refused by torch, as it should be
        self.flush()

    def _begin_step(self) -> None:
        self.flush()
        super()._begin_step()

    # ---- the end of backward

    def _wait(self, told: "Future[list[Report]]") -> None:
        self.executor.open_gate()
        self.executor.await_result(told)

    def _settle(self, index: int, own: torch.Tensor | None, used_anywhere: bool) -> None:
        parameter, slot = self._parameters[index](), self.slots[index]
        if used_anywhere and parameter is not None:
            parameter.grad = slot.hand_out()
        if not used_anywhere:
            self._not_used[slot.bucket].append((index, own))

    def _closed(self, exposed_s: float) -> None:
        self._exposed_s, self._scale, self._all_used = exposed_s, None, not self._not_used
        self._running_out.set()
        self._under_way = dict.fromkeys(self._order)
        for slot, reference in zip(self.slots, self._parameters, strict=True):
            parameter = reference()
            if parameter is not None and slot.handed is not None and parameter.grad is slot.handed:
                use_later(slot.handed, partial(self._settle_bucket, slot.bucket))

    # ---- stepping

    def _step_asked_for(self, optimizer: torch.optim.Optimizer, whole: Callable[[], Any]) -> Any:
        with self._lock:
            if not self._under_way:
                return whole()
            stepped_already = any(is_later(p) for group in optimizer.param_groups for p in group["params"])
            if stepped_already or self._say_why_whole(optimizer):
                self.flush()
                return whole()
            groups = snapshot(optimizer)
            ours, others = self._shared_out(groups)
            with looking():
                due = [parameter for parameter in others if parameter.grad is not None]
            if due or not ours:
                step_only(optimizer, whole, groups, others)
            self._later_steps.append(_LaterStep(optimizer, whole, groups, ours))
            for bucket, parameters in ours.items():
                for parameter in parameters:
                    use_later(parameter, partial(self._settle_bucket, bucket))
            optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers look at it
        return None

    def _shared_out(self, groups: Groups) -> tuple[dict[int, list[torch.nn.Parameter]], list[torch.nn.Parameter]]:
        """The parameters whose gradient is under way, by bucket, and the others."""
        waiting = {
            id(slot.handed): slot.bucket
            for slot in self.slots
            if slot.handed is not None and slot.bucket in self._under_way
        }
        ours: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
        others: list[torch.nn.Parameter] = []
        with looking():
            for parameter in (parameter for group in groups for parameter in group["params"]):
                bucket = waiting.get(id(parameter.grad)) if parameter.grad is not None else None
                (others if bucket is None else ours[bucket]).append(parameter)
        return ours, others

    def _say_why_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._say(why_whole(optimizer, self._model(), self._compiled_before), optimizer)

    def _say(self, why: str, optimizer: torch.optim.Optimizer) -> bool:
        """Warn, once, why this schedule hides nothing. Returns whether there is a reason."""
        if why and why not in self._said:
            self._said.add(why)
            warnings.warn(
                f"the pipelined schedule waits for all gathers in {type(optimizer).__name__}.step and hides none of them: "
                f"{why}. The result is the same; use schedule='backward', or change that.",
                stacklevel=6,
            )
        return bool(why)

    # ---- clipping

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        norm = self._clip_by_shards(max_norm) if norm_type == 2.0 else None
        return super().clip_grad_norm_(parameters, max_norm, norm_type) if norm is None else norm

    @torch.no_grad()
    def _clip_by_shards(self, max_norm: float) -> torch.Tensor | None:
        """By the norm of the shards of all ranks, as soon as all reduce phases are done. Collective where buckets are not
        compressed and all parameters were used: what all ranks know alike. Where on any rank a script has seen gradients of
        this step, and may have changed them, nothing is done."""
        with self._lock:
            self._check_usable()
            shards = exact_shards(self.executor)
            if not shards or not self._all_used or len(self.active) < self.group.world_size:
                return None
            untouched = len(self._under_way) == len(self.executor.buckets) and self._scale is None and self._all_ours()
            if untouched:
                start = time.perf_counter()
                with self._failures_told():
                    self.executor.await_gate()
                self._exposed_s += time.perf_counter() - start
            try:
                norm = norm_over_ranks(self.control, shards if untouched else None, 2.0)
            except LinkError as error:
                raise self.broken("the norm of all gradients", error) from error
            if norm is None:
                return None
            self._scale = clip_coefficient(norm, max_norm)
            return torch.tensor(norm, dtype=shards[0].dtype, device=shards[0].device)

    def _all_ours(self) -> bool:
        """Whether every parameter's gradient is the one under way."""
        with looking():
            pairs = zip(self.slots, self._living(), strict=True)
            return all(parameter is not None and parameter.grad is slot.handed for slot, parameter in pairs)

    # ---- waiting

    def flush(self) -> None:
        with self._lock:
            if not self._under_way and not self._running_out.is_set():
                return
            for bucket in list(self._under_way):
                self._settle_bucket(bucket)
            with self._failures_told():
                meters = self.executor.finish()
            self._running_out.clear()
            self._later_steps = []
            self.on_measured(StepReport(meters, self._exposed_s))

    @torch.no_grad()
    def _settle_bucket(self, bucket: int) -> None:
        """Wait for one bucket, and step its parameters where that was asked for."""
        with self._lock:
            self._check_usable()
            if bucket not in self._under_way:
                return
            start = time.perf_counter()
            with self._failures_told():
                self.executor.await_bucket(bucket)
            self._exposed_s += time.perf_counter() - start
            del self._under_way[bucket]
            if self._scale is not None:
                self.executor.buckets[bucket].flat.mul_(self._scale)
            self._arrived(bucket)

    def _arrived(self, bucket: int) -> None:
        """All tasks of a bucket are done."""
        for slot in self.executor.buckets[bucket].slots:
            if slot.handed is not None:
                make_current(slot.handed)
        for index, own in self._not_used.pop(bucket, []):
            super()._settle(index, own, used_anywhere=False)
        for step in self._later_steps:
            if parameters := step.parameters.pop(bucket, None):
                self._step_now(step, parameters)

    def _step_now(self, step: _LaterStep, parameters: list[torch.nn.Parameter]) -> None:
        of_parameter = dict(zip(map(id, self._living()), self.slots, strict=True))
        kept = []
        for parameter in parameters:
            make_current(parameter)
            kept.append(parameter.grad)
            parameter.grad = of_parameter[id(parameter)].handed
        with outermost(parameters[0].device):
            step_only(step.optimizer, step.whole, step.groups, parameters)
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad

    def _living(self) -> list[torch.nn.Parameter | None]:
        return [reference() for reference in self._parameters]

    def _fail(self, error: Any) -> Any:
        self._running_out.clear()
        return super()._fail(error)

    def _forget(self) -> None:
        """Leave tensors as they are."""
        self._under_way, self._later_steps = {}, []
        self._not_used.clear()
        self._running_out.clear()
        for slot, parameter in zip(self.slots, self._living(), strict=True):
            for tensor in (slot.handed, parameter):
                if tensor is not None:
                    make_current(tensor)


def _let_go(executor: Executor, running_out: threading.Event) -> None:
    """Nobody waits any more; other ranks may still wait for what this one sends."""
    if running_out.is_set():
        executor.drain()
    executor.give_up()
