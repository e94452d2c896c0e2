"""A job as drivers need it (`DrivenJob`) and use it (`Live`), and a watch on how a script calls its optimizers (`Stepped`)."""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import torch

from gradwire.auto.decision import say_failed
from gradwire.core import Plan, Schedule
from gradwire.engine import GradientWatcher, ModelHook, Witness, WitnessedJob
from gradwire.exchange import Exchange, StepReport
from gradwire.plan import Policy
from gradwire.transport import Lane, Lanes, LanesObserver, Link, LinkError, MergedValues, gather_bytes, merge_over_ranks

T = TypeVar("T")


class HoldsBuckets(LanesObserver):
    """Holds buckets back until all are ready."""

    holds = True


class TimesDevice(LanesObserver):
    """Lets steps be timed on the device."""

    times_device = True


_HOLDER, _TIMER = HoldsBuckets(), TimesDevice()
_TIMED_NUMEL = 2**20
"""Elements of the operation that shows whether a device can be timed."""


class DrivenJob(WitnessedJob, Protocol):
    """A job whose plan a driver decides."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def active(self) -> Sequence[int]:
        """The ranks that had a batch in the last step. All ranks have the same answer."""
        ...

    @property
    def began_s(self) -> float | None:
        """Start of the step's first training forward, in seconds of time.perf_counter; None if none was seen."""
        ...

    @property
    def first_gradient_s(self) -> float:
        """The moment when the step's first gradient became ready; 0 if none was seen."""
        ...

    @property
    def inputs(self) -> int:
        """Number of elements in the inputs of this step's training forwards; 0 if none was seen."""
        ...

    @property
    def witness(self) -> Witness: ...
    @property
    def reports(self) -> Sequence[StepReport]:
        """The reports of the last steps."""
        ...

    def settle(self) -> None:
        """Wait until nothing is under way."""
        ...

    def watch_gradients(self, watcher: GradientWatcher) -> Callable[[], None]:
        """Call watcher.ready(index) when the gradient of a parameter, numbered as `tensors` are, becomes ready, as long as the
        watcher lives. Returns what ends this."""
        ...

    def plan_of(self, policy: Policy) -> Plan:
        """The plan of a policy for the tensors in gradient-ready order, the same on all ranks."""
        ...

    def why_not(self, plan: Plan) -> str:
        """Why the plan's schedule cannot run, or gains nothing; '' if it can."""
        ...

    def change_to(self, plan: Plan) -> None:
        """Run this plan from the next step that begins. Raises PlanError on all ranks if it cannot run."""
        ...


@runtime_checkable
class RidesControl(Protocol):
    """A job whose ranks report to each other in every step."""

    def ride(self, values: MergedValues) -> Callable[[], MergedValues | None]:
        """Merge values over all ranks, together with the report of the next step. Returns a function that gives the result at the
        end of that step, and None before."""
        ...


class AllRanks:
    """All ranks that have these lanes, while no exchange runs. All methods communicate and are collective."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self.lanes, self.device = lanes, device
        self.group, self.grid = lanes.group, lanes.group.grid

    @property
    def far_lanes(self) -> Sequence[Lane]:
        """The lanes that share a far link with the first one."""
        return ()

    @property
    def step(self) -> int:
        """The number of steps so far, for errors."""
        return 0

    def exchange(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Send numbers to all ranks. The returned function waits and returns the numbers of every rank."""
        future = self.lanes.control.submit(partial(gather_bytes, text=struct.pack(f"<{len(numbers)}d", *numbers)))

        def wait() -> list[list[float]]:
            rows = self._result("measured times", future.result)
            return [list(struct.unpack(f"<{len(raw) // 8}d", raw)) for raw in rows]

        return wait

    def merged(self, most: Sequence[float], sums: Sequence[float] = ()) -> MergedValues:
        """Merge values over all ranks, which have as many: maxima and sums. All ranks get the same bits."""
        values = MergedValues(b"", tuple(most), tuple(sums))
        future = self.lanes.control.submit(partial(merge_over_ranks, own=values, tag=self.lanes.first_tag))
        return self._result("measured times", future.result)

    def made_by_first(self, make: Callable[[], str], instead: str) -> str:
        """Return on all ranks a text that rank 0 makes. Return '' if making it failed with any exception, because the
        other ranks wait for an answer. instead: what runs after a failure, for the log."""
        text = ""
        if self.group.rank == 0:
            try:
                text = make()
            except Exception:
                say_failed(instead)
        return self.from_all(text)[0]

    def from_all(self, text: str) -> list[str]:
        future = self.lanes.control.submit(partial(gather_bytes, text=text.encode() or b" "))
        return [raw.decode().strip() for raw in self._result("the exchange of a decision", future.result)]

    def on_lane(self, job: Callable[[Link], T]) -> T:
        """Run a job on the first lane. Its link carries gradients."""
        return self._result("the exchanges that measure links", self.lanes.data[0].submit(job).result)

    def _result(self, what: str, result: Callable[[], T]) -> T:
        try:
            return result()
        except LinkError as error:
            raise self.lanes.broken(what, error, self.step) from error


class Live(AllRanks):
    """A job between two steps. All methods that communicate are collective."""

    def __init__(self, job: DrivenJob) -> None:
        super().__init__(job.lanes, job.device)
        self.settled = False
        """Whether times are of the last step but one, which a device that queues work has done: nothing waits for it."""
        self.job, self.infos = job, job.tensors
        """The trainable tensors, in registration order. A change of the model makes another list."""
        self.plan_of = job.plan_of
        """Makes the plan of a policy for the tensors in gradient-ready order. All ranks get the same plan."""

    @property
    def step(self) -> int:
        """The number of steps that counted so far."""
        return self.job.step

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def far_lanes(self) -> Sequence[Lane]:
        return self.lanes.far_lanes

    @property
    def at_once(self) -> int:
        """How many pieces this rank exchanges at a time."""
        return len(self.lanes.data) - self.lanes.offload

    @property
    def reports(self) -> bool:
        """Whether ranks report to each other at the end of each step."""
        return isinstance(self.job, RidesControl)

    @property
    def everybody(self) -> bool:
        """Whether every rank had a batch in this step. All ranks have the same answer."""
        return len(self.job.active) == self.group.world_size

    def merge(self, most: Sequence[float], sums: Sequence[float]) -> Callable[[], MergedValues | None]:
        """Begin to merge values over all ranks: maxima and sums. The returned function gives the result, at the same step on all
        ranks, and None as long as it is not there."""
        values = MergedValues(b"", tuple(most), tuple(sums))
        if isinstance(self.job, RidesControl):
            return self.job.ride(values)
        future = self.lanes.control.submit(partial(merge_over_ranks, own=values, tag=self.lanes.first_tag))
        return lambda: self._result("measured times", future.result)

    @property
    def began_s(self) -> float | None:
        """Start of the step's first training forward, in seconds of time.perf_counter. If no forward was seen: the
        moment when the first gradient became ready. None if neither was seen."""
        first_s = self.job.first_gradient_s
        return self.job.began_s or (first_s if first_s > 0 else None)

    @property
    def link_us(self) -> float:
        """Time that this rank's lanes spent on links in the last step, including the wait for other ranks. On a device that
        queues work: the time in which the device exchanged or encoded."""
        if (report := self._report) is None:
            return 0.0
        return 1e6 * (report.link_s if report.device is None else report.device.busy_s)

    @property
    def _report(self) -> StepReport | None:
        reports = self.job.reports
        return reports[-2 if self.settled and len(reports) > 1 else -1] if reports else None

    @property
    def inputs(self) -> int:
        """Number of elements in the inputs of this step's training forwards; 0 if the script calls parts of the model."""
        return self.job.inputs

    @property
    def bytes_between_nodes(self) -> list[int]:
        """Bytes that this rank sends in a step to other nodes, by bucket. With one node: bytes to other ranks."""
        buckets = self.job.exchange.bucket_stats()
        return [each.inter_bytes if self.grid.nodes > 1 else each.wire_bytes for each in buckets]

    @property
    def warms_up(self) -> bool:
        """Whether the step that ended had other specs than late steps have."""
        return self.job.exchange.warms_up(max(0, self.step - 1))

    @property
    def is_compared(self) -> bool:
        """Whether an observer compares steps, as `handle.profile()` does."""
        return any(each.compares for each in self.lanes.observers)

    @property
    def codec_problem(self) -> str:
        """The fault of the codecs that run, in a few words; '' if there is none."""
        return self.job.witness.problem

    @property
    def exposed_us(self) -> float:
        """Time that the end of the last backward waited for exchanges, in microseconds. On a device that queues work, the time
        that the device waited."""
        if (report := self._report) is None:
            return 0.0
        return 1e6 * (report.exposed_s if report.device is None else report.device.exposed_s)

    @property
    def queues(self) -> bool:
        """Whether lanes and the script only queue their work, on a device."""
        return self.lanes.queues

    def wait(self) -> None:
        """Wait for the computation on the device, and for nothing else: gathers may still run during the next forward."""
        streams = self.lanes.data[0].link.streams
        streams.synchronize(streams.mark())

    def time_device(self, on: bool) -> None:
        """Time the next steps on the device, or stop timing."""
        self.lanes.observe(_TIMER, on)

    def why_no_times(self) -> str:
        """Why this rank cannot time work on its device; '' if it can."""
        streams = self.lanes.data[0].link.streams
        try:
            began = streams.timed_mark()
            torch.zeros(_TIMED_NUMEL, device=self.device).add_(1.0)
            seconds = streams.elapsed_s(began, streams.timed_mark())
        except (RuntimeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "" if seconds > 0 or not self.queues else "an operation of a million numbers takes no time by its clock"

    def hold(self, on: bool) -> None:
        """Delay all sends of the next steps until the last gradient is ready, or stop delaying."""
        self.lanes.observe(_HOLDER, on)

    def why_not(self, schedule: Schedule) -> str:
        """Return why this rank's script cannot run a schedule or gains nothing by it; '' if it can."""
        return self.job.why_not(msgspec.structs.replace(self.plan, schedule=schedule))

    def change_to(self, plan: Plan) -> None:
        """Run this plan from the next step that begins. Raises PlanError on all ranks if the engine cannot run the plan."""
        if plan is not self.plan and plan.digest() != self.plan.digest():
            self.job.change_to(plan)


class Stepped:
    """Watches the steps of optimizers until one was seen. Some schedules call `step()`, and not every script allows it."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._handles: list[Any] = []
        self._problem: str | None = None
        """None before a step was seen; '' if it was an ordinary one, or if there is no optimizer."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_pre_hook(ModelHook(self, Stepped._steps)))
            else:
                self._problem = f"{type(optimizer).__name__} is no torch.optim.Optimizer, so its steps cannot be watched"
        if not self._handles and self._problem is None:
            self._problem = ""

    def _steps(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        name, self._problem = type(optimizer).__name__, self._problem or ""
        if any(argument is not None for argument in [*arguments[1:], *named.values()]):
            self._problem = f"{name}.step is called with a closure, which runs backward inside the step"
        elif getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            self._problem = f"a GradScaler unscales gradients inside {name}.step"

    def look(self) -> str:
        """Return the reason why gradwire cannot step the optimizers; '' if it can. A step that was seen ends the watch."""
        if self._problem is not None:
            self.remove()
        return "the script did not call step() of the optimizers that it passed" if self._problem is None else self._problem

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
