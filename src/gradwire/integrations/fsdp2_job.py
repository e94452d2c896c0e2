"""The job of a model under FSDP2 or HSDP, as recordings read it: the gradients of each module are one bucket."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.auto import ChosenSpecs
from gradwire.core import MemoryRecord, Plan, Spec, TensorInfo
from gradwire.engine import Observers, ValueWatcher
from gradwire.exchange import BucketStats, Exchange, ExchangeStats, StepReport, TaskTimes
from gradwire.integrations.fsdp2_plans import WHOLE, ModuleSpecs
from gradwire.plan import Policy
from gradwire.record import Decision
from gradwire.transport import Group, LanesObserver, Meter

__all__ = ["ModuleJob", "of_one_phase"]


class ModuleJob(LanesObserver):
    """A model under FSDP2 in training. `ModuleExchanges` calls it for each exchange of gradients.

    exchanges_of: the exchanges of a module's gradients.
    """

    def __init__(self, model: torch.nn.Module, specs: ModuleSpecs, exchanges_of: Callable[[str], list[Exchange]]) -> None:
        self._model, self._specs, self._exchanges_of, self.one_phase = weakref.ref(model), specs, exchanges_of, specs.one_phase
        self.model_name = type(model).__name__.removeprefix("FSDP")
        self.tensors: list[TensorInfo] = specs.wholes
        self.device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self.observers = Observers()
        self.step = 0
        self._group: Group | None = None
        self._place = {tensor.name.removesuffix(WHOLE): at for at, tensor in enumerate(self.tensors)}
        self._plan: Plan | None = None
        self._watchers: list[weakref.ref[ValueWatcher]] = []
        self._of_tasks: list[LanesObserver] = []
        self._lists: list[list[TaskTimes] | None] = []
        """A list of each observer of tasks, for the step that runs."""
        self._times: list[TaskTimes] = []
        """Tasks of the exchange that runs."""
        self._in_step = False
        self._meters: list[Meter] = []

    @property
    def driver(self) -> "ChosenOnce | None":
        return None if self._specs.chosen is None else ChosenOnce(self._specs.chosen)

    @property
    def policy(self) -> Policy | None:
        plan = self._specs.plan
        return Policy(default=plan) if isinstance(plan, Spec) else plan if isinstance(plan, Policy) else None

    @property
    def model(self) -> torch.nn.Module | None:
        return self._model()

    @property
    def group(self) -> Group:
        return self._group or Group.of(None)

    @property
    def records(self) -> bool:
        return dist.get_rank() == 0

    @property
    def running(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    @property
    def exchange(self) -> object:
        return self._plan

    @property
    def next_step(self) -> int:
        return self.step

    synchronises = True
    """`ModuleExchanges` calls it only where FSDP2 sends gradients."""

    @property
    def predicted_us(self) -> Mapping[str, float]:
        chosen = self._specs.chosen
        return {} if chosen is None else {name + WHOLE: us for name, us in chosen.module_us.items()}

    def stats(self) -> ExchangeStats:
        """Statistics by module, in the order of the plan's buckets."""
        found = [
            [each.stats() for each in self._exchanges_of(bucket.tensors[0].removesuffix(WHOLE))] for bucket in self.plan.buckets
        ]
        buckets = [_joined(bucket.tensors, of) for bucket, of in zip(self.plan.buckets, found, strict=True)]
        every = [stats for of in found for stats in of]
        memory = MemoryRecord(
            **{field: sum(getattr(each.memory, field) for each in every) for field in MemoryRecord.__struct_fields__}
        )
        sums = {field: sum(getattr(each, field) for each in buckets) for field in _BYTES}
        whole = ExchangeStats(steps=self.step, codec_us=0.0, memory=memory, buckets=tuple(buckets), **sums)
        return of_one_phase(whole) if self.one_phase else whole

    def watch_values(self, watcher: ValueWatcher) -> Callable[[], None]:
        reference = weakref.ref(watcher)
        self._watchers.append(reference)
        return lambda: self._watchers.remove(reference)

    def watch_tasks(self, observer: LanesObserver) -> Callable[[], None]:
        self._of_tasks.append(observer)
        return lambda: self._of_tasks.remove(observer)

    def task_times(self) -> list[TaskTimes] | None:
        """A list for the tasks of the exchange that begins, which is the only one."""
        self._times = []
        return self._times

    # ---- what happens

    def begins(self, module: str, shards: Sequence[torch.Tensor], exchange: Exchange) -> None:
        """The gradients of a module are there, and their exchange begins."""
        self._group = exchange.group
        if self._plan is None:
            self._plan = self._specs.plan_of_all(exchange.group.world_size, exchange.group.grid.ranks_per_node_if_even)
        if not self._in_step:
            self._in_step = True
            self.observers.begins()
            self._lists = [each.task_times() for each in self._of_tasks]
        exchange.lanes.observe(self, on=bool(self._of_tasks))
        watchers = self._living()
        flat = torch.cat([each.reshape(-1) for each in shards]) if watchers else None
        for watcher in watchers:
            watcher.coming(self._place[module], flat)
            watcher.ready(self._place[module])

    def resumed(self, module: str) -> None:
        """Backward goes on after the call for a module."""
        for watcher in self._living():
            watcher.resumed(self._place[module])

    def exchanged(self, module: str, exchange: Exchange) -> None:
        """The exchange of a module's gradients has ended."""
        self._meters += exchange.meters
        at = next(at for at, bucket in enumerate(self.plan.buckets) if bucket.tensors[0] == module + WHOLE)
        for each in self._lists:
            if each is not None:
                each += [times._replace(task=times.task._replace(bucket=at)) for times in self._times]

    def ended(self, waited_s: float) -> None:
        """A backward has ended, and waited so long for exchanges."""
        if not self._in_step:
            return
        self.step, self._in_step, self._lists = self.step + 1, False, []
        self.observers.measured(StepReport(self._meters, waited_s))
        self._meters = []
        self.observers.finished(waited_s)

    def _living(self) -> list[ValueWatcher]:
        return [watcher for reference in self._watchers if (watcher := reference()) is not None]


class ChosenOnce(NamedTuple):
    """The choice of auto, as a recording reads a driver."""

    specs: ChosenSpecs

    def recorded(self) -> Decision:
        return Decision(by="plan='auto', in the first backward", words=(str(self.specs),))

    def measurements(self) -> None:
        """None: the report predicts steps whose exchanges overlap, and these do so by one module at most."""


_SENT = ("wire_bytes", "intra_bytes", "inter_bytes")
_BYTES = (*_SENT, "gradient_bytes")


def _joined(tensors: tuple[str, ...], found: Sequence[ExchangeStats]) -> BucketStats:
    """The sums of a module's exchanges, each of one bucket."""
    buckets = [bucket for stats in found for bucket in stats.buckets]
    fields = ("numel", "chunks", *_BYTES)
    return BucketStats(tensors, **{field: sum(getattr(bucket, field) for bucket in buckets) for field in fields})


def of_one_phase(stats: ExchangeStats) -> ExchangeStats:
    """The statistics of an exchange that runs one of its two phases. Both send equally many bytes: all shards have one size."""

    def halves(each: ExchangeStats | BucketStats) -> dict[str, Any]:
        return {field: getattr(each, field) // 2 for field in _SENT}

    return replace(stats, **halves(stats), buckets=tuple(replace(each, **halves(each)) for each in stats.buckets))
