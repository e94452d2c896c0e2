"""What a rank can know alone, before ranks compare notes: the parameters, and a plan that fits them."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from gradwire._version import __version__
from gradwire.core.checks import under
from gradwire.core.plan import Plan
from gradwire.core.schedules import Backward, Delayed
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.engine.buffers import ModelBuffers
from gradwire.engine.elementwise import why_not_sharded
from gradwire.engine.options import check_sharded
from gradwire.engine.registry import REGISTRY
from gradwire.engine.weights import check_local_updates
from gradwire.errors import PlanError, StepStateError
from gradwire.planner.named import check_known
from gradwire.planner.policy import Policy, Uniform

__all__ = ["Prepared", "check_optimizers", "facts", "prepare", "what_changed"]


class Prepared(NamedTuple):
    """A model and a plan that belong together."""

    parameters: dict[str, torch.nn.Parameter]
    """The trainable ones by name, in registration order."""
    tensors: list[TensorInfo]
    plan: Plan
    policy: Policy | None
    """What the plan was made from and will be made from again."""


def prepare(model: Any, plan: Any, ranks: int, ours: Collection[torch.nn.Parameter] = ()) -> Prepared:
    """Raises PlanError or StepStateError where model and plan cannot be run. `ours` may belong to a handle already."""
    if not isinstance(model, torch.nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}: pass the torch.nn.Module whose gradients are synchronised."
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PlanError(
            "model is wrapped in DistributedDataParallel, which would send gradients too. Pass model.module."
        )
    _check_memory(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise PlanError("no parameter of the model is trainable, so there is nothing to synchronise.")
    known = {id(parameter) for parameter in ours}
    for name, parameter in parameters.items():
        if REGISTRY.owns(parameter) and id(parameter) not in known:
            raise StepStateError(
                f"parameter {name!r} belongs to a model that is parallelized already: its gradient would be averaged "
                "twice. Keep the first handle, or call its detach() before."
            )
        if type(parameter.data) is not torch.Tensor:
            raise PlanError(
                f"parameter {name!r} is a {type(parameter.data).__name__}: it is sharded already. gradwire's engine takes "
                "whole tensors."
            )
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise PlanError(f"the model's parameters lie on {', '.join(devices)}; a handle works on one device.")
    tensors = [_info(name, parameter) for name, parameter in parameters.items()]
    made, policy = _plan(plan, tensors, ranks)
    made.check_against(tensors)
    return Prepared(parameters, tensors, made, policy)


def _check_memory(model: torch.nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            cure = "Run a batch through the model" if is_lazy(tensor) else "Load it, or call to_empty(device=...),"
            raise PlanError(f"{name!r} has no memory yet ({type(tensor).__name__}, meta). {cure} before parallelize.")
        if tensor.is_quantized:
            raise PlanError(
                f"{name!r} is quantized, and gradwire cannot send such tensors from rank 0. Keep it outside."
            )


def what_changed(model: torch.nn.Module, owned: Collection[int], buffers: ModelBuffers) -> str | None:
    """The first trainable parameter whose id is not in `owned`, or "a buffer"."""
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in owned:
            if not isinstance(parameter, torch.nn.Parameter):
                return None  # torch.func.functional_call: others stand in for this one forward
            return next(repr(name) for name, p in model.named_parameters() if p is parameter)
    return "a buffer" if buffers.changed(model) else None


def facts(prepared: Prepared | None, problem: Exception | None) -> dict[str, Any]:
    """What ranks compare, most telling first."""
    if prepared is None:
        return {"error": f"{type(problem).__name__}: {problem}"}
    plan, policy = prepared.plan, prepared.policy
    return {
        "gradwire version": __version__,
        "torch version": torch.__version__,
        "model": [[t.name, list(t.shape), t.dtype, t.device] for t in prepared.tensors],
        "model's memory formats": [[name, list(p.stride())] for name, p in prepared.parameters.items()],
        "plan": policy.to_json(None) if policy is not None else f"{plan.digest()[:16]} {plan.buckets[0].spec!r}",
    }


def _plan(plan: Any, tensors: list[TensorInfo], ranks: int) -> tuple[Plan, Policy | None]:
    if callable(plan):  # of a driver
        plan = plan(tensors, ranks)
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(Path(plan))
    if isinstance(plan, Plan):
        for index, bucket in enumerate(plan.buckets):
            with under(f"buckets[{index}]"):
                check_known(bucket.option)
        return plan, None
    if isinstance(plan, Spec):
        plan = Uniform(plan)
    if not isinstance(plan, Policy):
        raise PlanError(
            f"plan is a {type(plan).__name__}: it must be a spec, a Policy, a Plan or the path of a plan file."
        )
    # before the first step the best guess is that gradients come in the reverse order of registration
    return plan.plan(tensors[::-1], ranks), plan


def check_optimizers(optimizer: Any, prepared: Prepared) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises PlanError for one that steps nothing of the model, for momentum beside a spec that has
    its own, and for none where the schedule decides when they step."""
    schedule = prepared.plan.schedule
    if not optimizer and not isinstance(schedule, Backward):
        raise PlanError(
            f"schedule is {schedule!r}, which decides when parameters are stepped, and no optimizer was passed. Call "
            "gw.parallelize(model, optimizer, plan=...), or use schedule='backward'."
        )
    owners = [spec for bucket in prepared.plan.buckets for spec in bucket.specs if spec.owns_momentum]
    if optimizer is None:
        if owners:
            raise PlanError(
                f"{owners[0]!r} applies momentum to the gradients, so the optimizer must not, and none was passed to look at. "
                "Call gw.parallelize(model, optimizer, plan=...)."
            )
        return []
    ours = {id(parameter) for parameter in prepared.parameters.values()}
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise PlanError(f"optimizer is a {type(each).__name__}: pass a torch optimizer or a list of them.")
        if not any(id(p) in ours for param_group in each.param_groups for p in param_group["params"]):
            raise PlanError(
                f"no parameter of this {type(each).__name__} is a trainable parameter of the model. Was it made for another "
                "copy, or before model.to(...)?"
            )
        for group in each.param_groups if owners else ():
            field = next((name for name in ("momentum", "betas") if group.get(name)), "")
            value = group.get(field, 0)
            if (value[0] if isinstance(value, (tuple, list)) else value) > 0:
                raise PlanError(
                    f"this {type(each).__name__} has {field}={value}, and {owners[0]!r} applies momentum already: gradients "
                    "would be averaged over time twice. Use torch.optim.SGD without momentum, or DGC(momentum=0)."
                )
    if prepared.plan.shards_optimizer:
        _check_sharded(optimizers, prepared)
    if isinstance(schedule, Delayed):
        _check_delayed(schedule, optimizers, prepared, owners)
    return optimizers


def _check_sharded(optimizers: Sequence[torch.optim.Optimizer], prepared: Prepared) -> None:
    plan = prepared.plan
    for index, bucket in enumerate(plan.buckets):
        check_sharded(index, bucket)
    if len(plan.launch) - plan.gate < len(plan.buckets):
        raise PlanError(
            f"only {len(plan.launch) - plan.gate} of the plan's {len(plan.buckets)} gather phases come after its last reduce "
            "phase, and with shard_optimizer they bring what the optimizer makes of all sums. Launch all reduce phases first."
        )
    _check_one(
        optimizers,
        prepared,
        many="with shard_optimizer one step updates all weights",
        others="With shard_optimizer an optimizer steps shards of the model's parameters, and no other tensors",
    )
    if why := why_not_sharded(optimizers[0]):
        raise PlanError(
            f"the schedule has shard_optimizer, and {why}. Use gw.Pipelined() without it, or an optimizer that treats elements "
            "apart, as torch's SGD, Adam, AdamW, NAdam, RAdam, RMSprop and Adagrad do."
        )


def _check_one(optimizers: Sequence[torch.optim.Optimizer], prepared: Prepared, many: str, others: str) -> None:
    """Raises PlanError for more than one optimizer, and for one that steps other tensors. The words are why not."""
    if len(optimizers) > 1:
        raise PlanError(
            f"{len(optimizers)} optimizers were passed, and {many}. Use one optimizer with several param_groups, or "
            "schedule='backward'."
        )
    ours = {id(parameter) for parameter in prepared.parameters.values()}
    foreign = [
        p for group in optimizers[0].param_groups for p in group["params"] if p.requires_grad and id(p) not in ours
    ]
    if foreign:
        raise PlanError(
            f"the optimizer steps {len(foreign)} tensors that are none of the model's trainable parameters, the first of shape "
            f"{tuple(foreign[0].shape)}. {others}. Give them an optimizer of their own, which is not passed."
        )


def _check_delayed(
    schedule: Delayed, optimizers: Sequence[torch.optim.Optimizer], prepared: Prepared, owners: Sequence[Spec]
) -> None:
    _check_one(
        optimizers,
        prepared,
        many="the delayed schedule updates all weights at once, a step later",
        others="The delayed schedule updates a step later, with gradients that such tensors do not have any more",
    )
    if owners and (schedule.k is not None or schedule.warmup_steps):
        raise PlanError(
            f"{owners[0]!r} sends gradients with momentum, and corrections and warm-up steps send them as they are. Use "
            "gw.Delayed(k=None), or a spec without momentum."
        )
    if schedule.local_update and schedule.local_lr != 0:
        check_local_updates(optimizers)


def _info(name: str, parameter: torch.nn.Parameter) -> TensorInfo:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(parameter.shape), dtype, "cpu" if parameter.device.type == "cpu" else "gpu")
