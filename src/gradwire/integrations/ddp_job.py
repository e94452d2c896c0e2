"""The job of a DDP model with gradwire's hook: what drivers and recordings read, and how a driver changes the plan.

DDP hands over a bucket of gradients at a time, and nothing of it can be sent before. So the moment of a bucket counts as that of
all its gradients, and the driver plans with what DDP's buckets allow."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto import Auto
from gradwire.core import Plan, Spec, TensorInfo
from gradwire.engine import GradientWatcher, ModelHook, Observers, Witness, leave_hooks_behind, state_of_decision, tensors_in
from gradwire.exchange import Exchange, ExchangeStats, StepReport
from gradwire.integrations.ddp_plans import advise
from gradwire.integrations.watchers import Watchers
from gradwire.plan import Policy
from gradwire.transport import Group, Lanes, LanesObserver

__all__ = ["DDPJob"]


class DDPJob:
    """A model in training whose gradients an exchange averages, for `Auto` and recordings to read: of DDP, or among members that
    come and go. Every rank calls it alike.

    parameters: those whose gradients the exchange averages, by name, in registration order. tensors: their facts."""

    optimizers: Sequence[torch.optim.Optimizer] = ()
    predicted_us: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        parameters: Mapping[str, torch.nn.Parameter],
        tensors: list[TensorInfo],
        plan: Plan | Policy | Spec | None,
    ) -> None:
        self._model, self.tensors, self.observers = weakref.ref(model), tensors, Observers()
        self.device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self.policy = Policy(default=plan) if isinstance(plan, Spec) else plan if isinstance(plan, Policy) else None
        """The policy of the script, if its plan follows from one."""
        self.reports = deque[StepReport](maxlen=100)
        self.began_s: float | None = None
        self.first_gradient_s, self.inputs = 0.0, 0
        self._place = {tensor.name: index for index, tensor in enumerate(tensors)}
        self._came, self._came_before = list[str](), list(self._place)[::-1]
        self._bucket_bytes: list[int] = []
        self._watchers = Watchers()
        self._hook, self.driver = None, None  # type: Any, Auto | None
        self._group, self.model_name = group, type(getattr(model, "module", model)).__name__
        self._exchange: Exchange | None = None
        self.witness = Witness(self)
        self.observers.add(self.witness)

    def run(self, exchange: Exchange, driver: Auto | None) -> None:
        """Go on with this exchange, whose plan the driver decides, if there is one."""
        self._exchange, self.driver = exchange, driver
        self._watchers.follow(exchange.lanes)
        model = self._model()
        if driver is not None and model is not None:
            leave_hooks_behind(model)
            self._hook = model.register_forward_pre_hook(ModelHook(self, DDPJob._before_forward), with_kwargs=True)

    @property
    def model(self) -> torch.nn.Module | None:
        return self._model()

    @property
    def running(self) -> bool:
        return self._exchange is not None

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    @property
    def lanes(self) -> Lanes:
        return self.exchange.lanes

    @property
    def group(self) -> Group:
        return self._group if self._exchange is None else self._exchange.group

    @property
    def records(self) -> bool:
        return self.group.rank == 0

    @property
    def plan(self) -> Plan:
        return self.exchange.plan

    @property
    def step(self) -> int:
        return 0 if self._exchange is None else self._exchange.step

    next_step = step

    @property
    def last_exchange(self) -> Exchange:
        return self.exchange

    @property
    def searching(self) -> bool:
        return self.driver is not None and self.driver.searching

    @property
    def synchronises(self) -> bool:
        model = self._model()
        return not isinstance(model, DistributedDataParallel) or model.require_backward_grad_sync

    def stats(self) -> ExchangeStats:
        stats = self.exchange.stats()
        return replace(stats, buckets=self.witness.of_buckets(stats.buckets))

    @property
    def active(self) -> Sequence[int]:
        """All ranks: in `join()` DDP calls the hook on those without a batch too."""
        return range(self.group.world_size)

    def plan_of(self, policy: Policy) -> Plan:
        """The plan of a policy for the tensors in the order in which DDP handed them over, the same on all ranks."""
        order = dict.fromkeys([*self._came_before, *self._place])
        tensors = [self.tensors[self._place[name]] for name in order]
        return policy.plan(tensors, self.group.world_size, self.group.grid.ranks_per_node_if_even)

    def why_not(self, plan: Plan) -> str:
        return "" if plan.schedule.word == "backward" else "DDP decides when gradients are sent"

    def change_to(self, plan: Plan) -> None:
        self.exchange.change_to(plan)

    def settle(self) -> None:
        """Do nothing: the hook of a step's last bucket has waited for all."""

    def watch_gradients(self, watcher: GradientWatcher, values: bool = False) -> Callable[[], None]:
        return self._watchers.add(watcher, values)

    def watch_values(self, watcher: GradientWatcher) -> Callable[[], None]:
        return self.watch_gradients(watcher, values=True)

    def watch_tasks(self, observer: LanesObserver) -> Callable[[], None]:
        return self._watchers.observe(observer)

    def came(self, names: Sequence[str], gradients: Sequence[torch.Tensor], nbytes: int) -> None:
        """DDP handed over the gradients of a bucket of so many bytes."""
        if not self._came:
            self.first_gradient_s = time.perf_counter()
        self._came += names
        self._bucket_bytes.append(nbytes)
        for name, gradient in zip(names, gradients, strict=True):
            self._watchers.came(self._place[name], gradient)

    def ended(self, exposed_s: float) -> None:
        """The step's exchange has ended, for which the last bucket's hook waited so long."""
        self._came_before = self._came
        self.reports.append(StepReport(self.exchange.meters, exposed_s, self.exchange.device_times))
        self.observers.measured(self.reports[-1])
        self.observers.finished(exposed_s)
        if self.driver is not None:
            first = not self.driver.decided
            self.driver.finished(self)
            if first and self.driver.decided and self.records and self.group.world_size > 1:
                advise(self._bucket_bytes)
        self._came, self._bucket_bytes = [], []
        self.began_s, self.first_gradient_s, self.inputs = None, 0.0, 0

    def state(self) -> dict[str, torch.Tensor]:
        """The fields of a rank's state for a plan that nothing but this run knows."""
        return {} if self.driver is None else state_of_decision(self.plan, self.driver)

    def leave(self) -> None:
        """Leave the exchange, until `run` is called with another one."""
        if self._exchange is not None:
            self.lanes.observe(self.witness, on=False)
        if self.driver is not None:
            self._hook.remove()
            self.driver.detached()
        self._watchers.leave()
        self._exchange = self.driver = None

    def stop(self) -> None:
        """Leave the exchange, which ends."""
        exchange = self._exchange
        self.leave()
        if exchange is not None:
            exchange.close()

    def _before_forward(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and model.training:
            self.began_s = self.began_s or time.perf_counter()
            self.inputs += sum(tensor.numel() for tensor in tensors_in((inputs, named)))
