"""The `pipelined` schedule (DeAR): reduce phases in backward, gather phases during the next forward.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire.core import Pipelined
from gradwire.engine.control import RankReports
from gradwire.engine.gradients import AnyGradient
from gradwire.engine.reducer import Reducer, told_to_all
from gradwire.engine.schedules.base import Closed, Missing, ScheduleEvents, TrainingJob, Traits
from gradwire.engine.torch_hooks.hooks import ModelHook
from gradwire.engine.torch_hooks.lazy_tensors import can_wait, is_later, looking, make_current, raise_later, use_later
from gradwire.engine.torch_hooks.optimizer_step import Groups, Stepping, outermost, snapshot, step_only
from gradwire.engine.torch_hooks.settling import SettleFirst
from gradwire.engine.torch_hooks.splitting import why_whole
from gradwire.errors import GradwireError
from gradwire.exchange import Exchange, StepReport, outside_modes
from gradwire.transport import Link, Mark, transfer


class Gathers:
    """The gathers under way between two steps. Nothing here launches an exchange: a gather comes, whichever rank waits."""

    def __init__(self, reducer: Reducer, model: torch.nn.Module, arrived: Callable[[int], None]) -> None:
        """`arrived`, a bound method, is called for each bucket when its tasks are done; its owner is not kept alive."""
        self._reducer, self._arrived = reducer, weakref.WeakMethod(arrived)
        weakref.finalize(model, ModelHook(self, Gathers._without_model)).atexit = False
        self.under_way: dict[int, None] = {}
        """Buckets that were not waited for yet, in launch order of their gathers."""
        self.exposed_s = 0.0
        """The seconds that were waited for the step."""
        self.lock = threading.RLock()
        """Evaluations may run on threads of their own."""
        self._order: list[int] = []
        self._arrivals: list[Mark] = []
        """On a device: marks behind what came with the buckets that were waited for, which other streams of the script have to
        wait for."""
        self._running_out = threading.Event()
        """Set while lanes run gathers that other ranks wait for."""

    def attach(self) -> None:
        """The exchange is another one."""
        last = {bucket: position for position, (bucket, _) in enumerate(self._reducer.exchange.plan.launch)}
        self._order = sorted(last, key=last.__getitem__)
        self._of_bucket: dict[int, list[int]] = defaultdict(list)
        for index, slot in enumerate(self._reducer.slots):
            self._of_bucket[slot.bucket].append(index)

    def begin(self) -> None:
        """The gate is open, or opens now: all buckets are under way."""
        self._running_out.set()
        self.under_way = dict.fromkeys(self._order)

    def await_sums(self) -> None:
        """Wait for the reduce phases of all buckets."""
        start = time.perf_counter()
        self._reducer.running.await_gate()
        self.exposed_s += time.perf_counter() - start

    @torch.no_grad()
    @outside_modes
    def settle_bucket(self, bucket: int) -> None:
        """Wait for one bucket, if it is under way."""
        with self.lock:
            self._reducer.lanes.check()
            if bucket not in self.under_way:
                return
            start = time.perf_counter()
            self._reducer.running.wait(bucket)
            self.exposed_s += time.perf_counter() - start
            del self.under_way[bucket]
            if (arrived := self._arrived()) is not None:
                arrived(bucket)
            streams = self._reducer.lanes.data[0].link.streams
            if (mark := streams.mark()) is not None:  # the current stream alone has waited
                self._arrivals.append(mark)
                for tensor in filter(can_wait, self._tensors(self._of_bucket[bucket])):
                    use_later(tensor, partial(streams.wait, mark))

    def _follow(self) -> None:
        """Let the current stream wait for what other streams have waited for: then all tensors are current."""
        for mark in self._arrivals:
            self._reducer.lanes.data[0].link.streams.wait(mark)
        if self._arrivals:
            self._arrivals = []
            for tensor in self.tensors():
                make_current(tensor)

    @told_to_all
    def flush(self) -> bool:
        """Wait for all buckets. Returns whether any was under way."""
        if not self._running_out.is_set():
            return False
        with self.lock:
            failed = self._reducer.lanes.failure is not None
            if not self.under_way and (failed or not self._running_out.is_set()):
                return False
            for bucket in list(self.under_way):
                self.settle_bucket(bucket)
            self._follow()
            running = self._reducer.running
            running.wait()
            running.release()
            self._running_out.clear()
            self._reducer.observers.measured(StepReport(running.meters, self.exposed_s))
            return True

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that may wait: gradients and parameters that are still there."""
        return self._tensors(range(len(self._reducer.gradients)))

    def _tensors(self, indices: Iterable[int]) -> Iterator[torch.Tensor]:
        for index in indices:
            both = self._reducer.gradients[index].handed, self._reducer.parameters[index]()
            yield from (tensor for tensor in both if tensor is not None)

    def _without_model(self) -> None:
        """The model is gone: wait now. A tensor that waits keeps the schedule, which keeps the optimizer and its parameters, and
        these keep the tensor through C++, where nothing looks for circles. After a failure each use of the tensor raises it."""
        # a lane that collected garbage must not wait for itself
        if threading.current_thread().name.startswith("gradwire-"):
            threading.Thread(target=self._without_model, name="settle without a model", daemon=True).start()
            return
        failure: GradwireError | None = None
        try:
            self.flush()
        except GradwireError as error:
            failure = error
        failure = failure or self._reducer.lanes.failure  # of a bucket that no longer counts as under way
        if failure is not None:
            for tensor in self.tensors():
                raise_later(tensor, failure)

    def forget(self) -> None:
        """Wait for nothing any more."""
        self.under_way, self._arrivals = {}, []
        self._running_out.clear()

    def let_go(self) -> Callable[[], None]:
        """See `Schedule.let_go`."""
        return partial(_let_go, self._reducer.exchange, self._running_out)


def settle_before_backward(schedule: ScheduleEvents, outputs: Iterable[torch.Tensor]) -> None:
    """A backward from these settles before it uses saved tensors: a parameter that was stepped since is refused by torch, as it
    should be."""
    for output in outputs:
        output.register_hook(ModelHook(schedule, lambda schedule, gradient: schedule.settle()))


def _let_go(exchange: Exchange, running_out: threading.Event) -> None:
    """Nobody waits any more; other ranks may still wait for what this one sends."""
    if running_out.is_set() and exchange.lanes.failure is None:
        exchange.drain()
    exchange.give_up()


@dataclass
class _LaterStep:
    """A step that the script asked for."""

    optimizer: torch.optim.Optimizer
    whole: Callable[[], Any]
    groups: Groups
    parameters: "dict[int, list[_Due]]"
    """Parameters that are still to be stepped, by bucket."""


_Due = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter and the gradient under way with which it is stepped."""


class PipelinedSchedule:
    """Runs reduce phases in backward, and gather phases during the next forward."""

    traits = Traits(lanes_busy_between_steps=True, acts_before_gradients=True)

    def __init__(self, reducer: Reducer, schedule: Pipelined, job: TrainingJob) -> None:
        self._reducer, self._gathers = reducer, Gathers(reducer, job.model, self._arrived)
        self._model, self._compiled_before = weakref.ref(job.model), job.compiled_before
        self._not_used: dict[int, list[Missing]] = defaultdict(list)
        """Parameters that no rank used, by bucket."""
        self._later_steps: list[_LaterStep] = []
        self._said: set[str] = set()
        self._scale: float | None = None
        """The factor of gradients that are under way, applied when they arrive; None: not clipped yet."""
        self._all_used = False
        """Whether in the last step every parameter was used on some rank."""
        self._stepping = Stepping(job.optimizers, self._step_asked_for)
        self._guard = SettleFirst(None, job.optimizers, ModelHook(self, PipelinedSchedule.settle))

    @staticmethod
    def why_not(job: TrainingJob) -> str:
        """See `ScheduleClass`."""
        return next(filter(None, (why_whole(each, job.model, job.compiled_before) for each in job.optimizers)), "")

    def attach(self) -> None:
        self._gathers.attach()
        self._of_bucket: dict[int, list[AnyGradient]] = defaultdict(list)
        for gradient in self._reducer.gradients:
            self._of_bucket[gradient.slot.bucket].append(gradient)

    def let_go(self) -> Callable[[], None]:
        return self._gathers.let_go()

    def detach(self) -> None:
        self._stepping.remove()
        self._guard.remove()
        self._gathers.forget()
        self._later_steps = []
        self._not_used.clear()
        for tensor in self._gathers.tensors():
            make_current(tensor)

    def on_forward(self, module: torch.nn.Module) -> None:
        if not torch.is_grad_enabled():
            self.settle()

    def after_forward(self, outputs: list[torch.Tensor]) -> None:
        """See `SeesBackward`."""
        settle_before_backward(self, outputs)

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Wait for the tensor that is accumulated into. Usually it is there: forward waited for it, or there is no gradient."""
        self.settle()

    def on_begin(self) -> None:
        self.settle()
        self._reducer.begin(self._reducer.exchange)

    # ---- the end of backward

    def on_end(self, told: "Future[RankReports]") -> None:
        self._reducer.running.open_gate()
        self._reducer.running.await_result(told)

    def on_closed(self, closed: Closed) -> None:
        for missing in closed.missing:
            gradient, parameter = self._reducer.gradients[missing.index], self._reducer.parameters[missing.index]()
            if missing.used_anywhere and parameter is not None:
                parameter.grad = gradient.hand_out()
            if not missing.used_anywhere:
                self._not_used[gradient.slot.bucket].append(missing)
        self._gathers.exposed_s, self._scale, self._all_used = closed.exposed_s, None, not self._not_used
        self._gathers.begin()
        self._reducer.running.mark_changed()
        settle = [partial(self._settle_bucket, bucket) for bucket in range(len(self._reducer.exchange.numels))]
        for gradient, parameter in zip(self._reducer.gradients, self._reducer.living(), strict=True):
            handed = gradient.handed
            if parameter is not None and handed is not None and parameter.grad is handed:
                use_later(handed, settle[gradient.slot.bucket])

    # ---- stepping

    @partial(told_to_all, script_steps=True)
    def _step_asked_for(self, optimizer: torch.optim.Optimizer, whole: Callable[[], Any]) -> Any:
        with self._gathers.lock:
            if not self._gathers.under_way:
                return whole()
            stepped_already = any(is_later(p) for group in optimizer.param_groups for p in group["params"])
            why = "" if stepped_already else why_whole(optimizer, self._model(), self._compiled_before)
            if stepped_already or warn_once(self._said, why, optimizer):
                self.settle()
                return whole()
            groups = snapshot(optimizer)
            ours, others = self._shared_out(groups)
            with looking():
                due = [parameter for parameter in others if parameter.grad is not None]
            if due or not ours:
                step_only(optimizer, whole, groups, others)
            self._later_steps.append(_LaterStep(optimizer, whole, groups, ours))
            for bucket, parameters in ours.items():
                settle = partial(self._settle_bucket, bucket)
                for parameter, _ in parameters:
                    use_later(parameter, settle)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers look at it
        return None

    def _shared_out(self, groups: Groups) -> tuple[dict[int, list[_Due]], list[torch.nn.Parameter]]:
        """The parameters whose gradient is under way, by bucket, and the others."""
        waiting = {
            id(handed): gradient.slot.bucket
            for gradient in self._reducer.gradients
            if gradient.slot.bucket in self._gathers.under_way and (handed := gradient.handed) is not None
        }
        ours: dict[int, list[_Due]] = defaultdict(list)
        others: list[torch.nn.Parameter] = []
        with looking():
            for parameter in (parameter for group in groups for parameter in group["params"]):
                grad = parameter.grad
                if grad is not None and (bucket := waiting.get(id(grad))) is not None:
                    ours[bucket].append((parameter, grad))
                else:
                    others.append(parameter)
        return ours, others

    # ---- clipping

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """See `ClipsGradients`."""
        return self._clip_by_shards(max_norm) if norm_type == 2.0 else None

    @torch.no_grad()
    def _clip_by_shards(self, max_norm: float) -> torch.Tensor | None:
        """Clip by the norm of the shards of all ranks, as soon as all reduce phases are done. Collective where buckets are not
        compressed and all parameters were used: what all ranks know alike. Where on any rank a script has seen gradients of
        this step, and may have changed them, nothing is done."""
        reducer, gathers = self._reducer, self._gathers
        with gathers.lock:
            reducer.lanes.check()
            shards = reducer.exchange.exact_sums()
            if not shards or not self._all_used or len(reducer.active) < reducer.group.world_size:
                return None
            all_under_way = len(gathers.under_way) == len(reducer.exchange.numels)
            untouched = all_under_way and self._scale is None and self._all_ours()
            if untouched:
                gathers.await_sums()
            norm = norm_over_ranks(reducer, shards if untouched else None, 2.0)
            if norm is None:
                return None
            self._scale = clip_coefficient(norm, max_norm)
            return torch.tensor(norm, dtype=shards[0].dtype, device=shards[0].device)

    def _all_ours(self) -> bool:
        """Whether every parameter's gradient is the one under way."""
        with looking():
            pairs = zip(self._reducer.gradients, self._reducer.living(), strict=True)
            return all(parameter is not None and parameter.grad is gradient.handed for gradient, parameter in pairs)

    # ---- waiting

    def settle(self) -> None:
        with self._gathers.lock:
            if self._gathers.flush():
                self._later_steps = []

    @told_to_all
    def _settle_bucket(self, bucket: int) -> None:
        """See `Gathers.settle_bucket`. Tensors that wait keep the schedule alive by it."""
        self._gathers.settle_bucket(bucket)

    def _arrived(self, bucket: int) -> None:
        """All tasks of a bucket are done: step its parameters where that was asked for."""
        if self._scale is not None:
            self._reducer.exchange.flats[bucket].mul_(self._scale)
        for gradient in self._of_bucket[bucket]:
            if (handed := gradient.handed) is not None:
                make_current(handed)
        for missing in self._not_used.pop(bucket, []):
            self._reducer.settle_missing(missing)
        for step in self._later_steps:
            if due := step.parameters.pop(bucket, None):
                self._step_now(step, due)

    def _step_now(self, step: _LaterStep, due: list[_Due]) -> None:
        parameters, kept = [parameter for parameter, _ in due], []
        for parameter, mean in due:
            make_current(parameter)
            kept.append(parameter.grad)
            parameter.grad = mean
        with outermost(parameters[0].device):
            step_only(step.optimizer, step.whole, step.groups, parameters)
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


def warn_once(said: set[str], why: str, optimizer: torch.optim.Optimizer) -> bool:
    """Warn, once for a reason, that the schedule hides nothing. Returns whether there is a reason."""
    if why and why not in said:
        said.add(why)
        warnings.warn(
            f"the pipelined schedule waits for all gathers in {type(optimizer).__name__}.step and hides none of them: "
            f"{why}. The result is the same; use schedule='backward', or change that.",
            stacklevel=5,
        )
    return bool(why)


# ---- the norm of the mean gradients before anything is gathered: that of the shards which ranks own


def norm_over_ranks(reducer: Reducer, shards: Iterable[torch.Tensor] | None, power: float) -> float | None:
    """The norm of all ranks' shards as one vector; None on all ranks where one of them passed None. `power`, above 0 and maybe
    inf, says which norm. Collective."""
    own = None
    if shards is not None:
        own = float(_joined([torch.linalg.vector_norm(shard, power, dtype=torch.float64) for shard in shards], power))
    with reducer.lanes.told("the norm of all gradients", reducer.step):
        return reducer.lanes.control.submit(partial(_norm, own=own, power=power)).result()


def _norm(link: Link, own: float | None, power: float) -> float | None:
    # the norm of each rank's shards, and whether it passed none
    told = torch.tensor([0.0 if own is None else own, float(own is None)], dtype=torch.float64)
    everybody = torch.empty(2 * link.world_size, dtype=torch.float64)
    with transfer():
        link.all_gather(everybody, told).wait()
    norms, without = everybody.view(-1, 2).unbind(1)
    return None if without.any() else float(_joined(list(norms), power))


def _joined(norms: list[torch.Tensor], power: float) -> torch.Tensor:
    """The norm of parts that have these norms."""
    return torch.linalg.vector_norm(torch.stack(norms), power) if norms else torch.zeros((), dtype=torch.float64)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor of gradients of this norm, as in torch.nn.utils.clip_grad_norm_: at most 1, and NaN for NaN."""
    return float((max_norm / (torch.tensor(norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0))
