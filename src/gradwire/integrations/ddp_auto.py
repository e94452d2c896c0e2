"""The job of a DDP model whose hook runs `plan="auto"`: what the driver reads, and how it changes the plan.

DDP hands over a bucket of gradients at a time, and nothing of it can be sent before. So the moment of a bucket counts as that of
all its gradients, and the driver plans with what DDP's buckets allow."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto import Auto, say
from gradwire.core import Plan, TensorInfo
from gradwire.engine import GradientWatcher, ModelHook, leave_hooks_behind, state_of_decision, tensors_in
from gradwire.exchange import Exchange, StepReport
from gradwire.plan import Policy

__all__ = ["DDPJob"]
_MOST_BYTES = 2**21
"""A bucket of DDP with more bytes, and with more than half of all gradients, leaves little to overlap."""


class DDPJob:
    """A DDP model in training, for `Auto` to read between two steps. Every rank's hook calls it alike.

    tensors: those that the exchange averages, in registration order."""

    optimizers: Sequence[torch.optim.Optimizer] = ()

    def __init__(self, model: DistributedDataParallel, tensors: list[TensorInfo], exchange: Exchange, driver: Auto) -> None:
        self.exchange, self.driver = exchange, driver
        self.group, self.lanes = exchange.group, exchange.lanes
        self.tensors, self.device = tensors, exchange.flats[0].device
        self.reports = deque[StepReport](maxlen=100)
        self.began_s: float | None = None
        self.first_gradient_s, self.inputs = 0.0, 0
        self._place = {tensor.name: index for index, tensor in enumerate(tensors)}
        self._came, self._came_before = list[str](), list(self._place)[::-1]
        self._bucket_bytes: list[int] = []
        self._watchers: list[weakref.ref[GradientWatcher]] = []
        leave_hooks_behind(model)
        self._hook = model.register_forward_pre_hook(ModelHook(self, DDPJob._before_forward), with_kwargs=True)

    @property
    def plan(self) -> Plan:
        return self.exchange.plan

    @property
    def step(self) -> int:
        return self.exchange.step

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

    def watch_gradients(self, watcher: GradientWatcher) -> Callable[[], None]:
        reference = weakref.ref(watcher)
        self._watchers.append(reference)
        return lambda: self._watchers.remove(reference) if reference in self._watchers else None

    def came(self, names: Sequence[str], nbytes: int) -> None:
        """DDP handed over the gradients of a bucket of so many bytes."""
        if not self._came:
            self.first_gradient_s = time.perf_counter()
        self._came += names
        self._bucket_bytes.append(nbytes)
        for watcher in filter(None, [each() for each in self._watchers]):
            for name in names:
                watcher.ready(self._place[name])

    def ended(self, exposed_s: float) -> None:
        """The step's exchange has ended, for which the last bucket's hook waited so long."""
        self._came_before = self._came
        self.reports.append(StepReport(self.exchange.meters, exposed_s))
        decided = self.driver.decisions.total
        self.driver.finished(self)
        if self.driver.decisions.total > decided == 0 and self.group.rank == 0:
            self._advise()
        self._came, self._bucket_bytes = [], []
        self.began_s, self.first_gradient_s, self.inputs = None, 0.0, 0

    def state(self) -> dict[str, torch.Tensor]:
        """The fields of a rank's state for a plan that nothing but this run knows."""
        return state_of_decision(self.plan, self.driver.searching)

    def close(self) -> None:
        """Leave the model alone."""
        self._hook.remove()
        self.driver.detached()

    def _advise(self) -> None:
        largest, total = max(self._bucket_bytes), sum(self._bucket_bytes)
        if self.group.world_size > 1 and largest > max(_MOST_BYTES, total / 2):
            say(
                f"DDP hands over {largest / 1e6:.1f} of {total / 1e6:.1f} MB of gradients in one bucket, and nothing of a bucket "
                "is sent before it is full. DistributedDataParallel(model, bucket_cap_mb=1) lets sending begin earlier."
            )

    def _before_forward(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and model.training:
            self.began_s = self.began_s or time.perf_counter()
            self.inputs += sum(tensor.numel() for tensor in tensors_in((inputs, named)))
