"""A step of the `delayed` or the `local` schedule whose exchange is under way, and which weights the next one computes on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from gradwire.core import Delayed, Plan
from gradwire.engine.control import BackwardState, RankReport
from gradwire.engine.prepare import Prepared, check_one_optimizer
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.weights import TwoWeights, check_local_updates
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, Slot
from gradwire.transport import Mark

Update = Callable[[Sequence[torch.nn.Parameter]], None]
"""Makes the global weights of these parameters, with the gradients that they hold."""


@dataclass
class Launched:
    """What is known of it until it lands."""

    exchange: Exchange
    state: BackwardState
    told: "Future[list[RankReport]]"
    sending: "list[Future[Mark]]"
    """Of the broadcast of buffers, if there are any."""
    update: Update | None
    """Steps them in the optimizer, with the values that its groups had when the script did."""


def by_bucket(plan: Plan, slots: Sequence[Slot]) -> list[list[int]]:
    """Places of slots, together those of a bucket, in the order in which buckets are launched."""
    buckets: dict[int, list[int]] = {bucket: [] for bucket, _ in plan.launch}
    for index, slot in enumerate(slots):
        buckets[slot.bucket].append(index)
    return list(buckets.values())


def check_delayed(prepared: Prepared, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises PlanError where the delayed schedule cannot run with these optimizers."""
    schedule = prepared.plan.schedule
    assert isinstance(schedule, Delayed)
    check_one_optimizer(
        optimizers,
        prepared,
        many="the delayed schedule updates all weights at once, a step later",
        others="The delayed schedule updates a step later, with gradients that such tensors do not have any more",
    )
    owners = [spec for bucket in prepared.plan.buckets for spec in bucket.specs if spec.owns_momentum]
    if owners and (schedule.k is not None or schedule.warmup_steps):
        raise PlanError(
            f"{owners[0]!r} sends gradients with momentum, and corrections and warm-up steps send them as they are. Use "
            "gw.Delayed(k=None), or a spec without momentum."
        )
    if schedule.local_update and schedule.local_lr != 0 and schedule.local_step == "optimizer":
        check_local_updates(optimizers)


def check_gradients(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raises StepStateError for gradients that cannot be launched as they are."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise StepStateError(
                f"the gradient of {name!r} is sparse; gradwire sends dense gradients. Use Embedding(..., sparse=False)."
            )
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        raise StepStateError(
            f"a GradScaler lets this {type(optimizer).__name__} unscale gradients in its step, and the delayed schedule "
            "sends them before. Make the optimizer with fused=False."
        )


def show_for_forward(
    module: torch.nn.Module, weights: TwoWeights, reducer: Reducer, settle: Callable[[], None]
) -> None:
    """Before the model's forward: a training forward computes on L, and others see W."""
    if torch._C._current_graph_task_id() != -1:
        return  # activations are computed again inside a backward
    if not (module.training and torch.is_grad_enabled()):
        if not module.training or not weights.computing:
            settle()
    elif reducer.converted() is None:
        reducer.lanes.check()
        weights.show_local()
        weights.computing = True


def finish_quietly(under_way: list[Launched]) -> None:
    """Other ranks need what this one still sends, also when its script has ended."""
    for launched in under_way:
        launched.exchange.finish_quietly(launched.told, *launched.sending)
