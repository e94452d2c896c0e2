"""`parallelize`: from a model and a plan to a handle."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire._version import __version__
from gradwire.collectives import Group, Lane, Link
from gradwire.core.checks import whole
from gradwire.core.plan import Plan
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.engine.agreement import agree
from gradwire.engine.failure import RollCall
from gradwire.engine.handle import _REGISTRY, Handle
from gradwire.errors import PlanError, StepStateError
from gradwire.planner.policy import Policy, Uniform, executable

__all__ = ["parallelize"]

CPU_LANES = 2
"""A lane blocks in its collectives on CPU: while one waits for the wire the other encodes."""


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | Policy | Spec | str | os.PathLike[str] = "auto",
    process_group: dist.ProcessGroup | None = None,
    drift_check_steps: int = 1000,
) -> Handle:
    """Synchronise the gradients of `model` over the ranks of `process_group` (default: all), in place.

    Nothing is wrapped and no state_dict key changes. All ranks get rank 0's parameters and buffers. From then on
    `grad` holds the mean gradient when `backward()` returns, whatever optimizer uses it. Collective: every rank of the
    group calls it at the same point.

    plan: a spec (`gw.QSGD(bits=4)` for every tensor), a `gw.Policy`, a `gw.Plan`, or the path of a plan's JSON file.
    optimizer: the optimizer, or several, that will step the model; in the `backward` schedule it is only checked.
    drift_check_steps: every so many steps ranks compare checksums of their weights, and all raise DisagreementError with
    the first tensor that differs; 0 never.

    Raises PlanError if the plan does not fit the model, DisagreementError on all ranks if ranks differ in model, plan or
    version, StepStateError if the model is parallelized already or torch.distributed is not initialised.

    Example, in a script started by torchrun::

        torch.distributed.init_process_group("gloo")
        handle = gw.parallelize(model, optimizer, plan=gw.QSGD(bits=4))
    """
    if not dist.is_initialized():
        raise StepStateError(
            "torch.distributed is not initialised, so there are no ranks to synchronise. Call "
            'torch.distributed.init_process_group("gloo") first and start the script with torchrun.'
        )
    if isinstance(process_group, int):  # GroupMember.NON_GROUP_MEMBER
        raise PlanError("this rank is not in the process_group it passed. Call parallelize only on the group's ranks.")
    group = Group.of(process_group)
    name = group.agree_on_name()
    # a margin below the caller's timeout, so that the error is raised, with the ranks' names, within it
    timeout = timedelta(seconds=0.85 * group.timeout.total_seconds())
    control = Lane(f"gradwire-{name}-control", Link(group, f"{name}/control", torch.device("cpu"), timeout))
    try:
        what = "steps from one comparison of weights to the next, 0 for never"
        whole("drift_check_steps", drift_check_steps, what, error=PlanError)
        prepared, problem = _prepare(model, optimizer, plan, group.world_size), None
    except Exception as error:
        prepared, problem = None, error
    facts = _facts(prepared, problem) | {"drift_check_steps": repr(drift_check_steps)}
    lanes: list[Lane] = []
    try:
        control.submit(lambda link: agree(link, facts, group.global_ranks)).result()
        if problem is not None:
            raise problem
        assert prepared is not None
        parameters, tensors, first_plan, policy = prepared
        device = next(iter(parameters.values())).device
        for index in range(CPU_LANES if device.type == "cpu" else 1):
            lanes.append(Lane(f"gradwire-{name}-{index}", Link(group, f"{name}/{index}", device, timeout)))
        roll_call = RollCall(group, name)
        engine = (group, lanes, control, roll_call, drift_check_steps)
        handle = Handle(model, parameters, tensors, first_plan, policy, *engine)
    except BaseException as error:
        for lane in [*lanes, control]:
            lane.stop()
        raise (problem if problem is not None else error) from None
    _REGISTRY.add(model, parameters.values(), handle)
    return handle


Prepared = tuple[dict[str, torch.nn.Parameter], list[TensorInfo], Plan, Policy | None]


def _prepare(model: torch.nn.Module, optimizer: Any, plan: Any, ranks: int) -> Prepared:
    """What this rank can know alone."""
    if not isinstance(model, torch.nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}: pass the torch.nn.Module whose gradients are synchronised."
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PlanError(
            "model is wrapped in DistributedDataParallel, which would send gradients too. Pass model.module."
        )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise PlanError("no parameter of the model is trainable, so there is nothing to synchronise.")
    for name, parameter in parameters.items():
        if parameter in _REGISTRY.owned:
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
    _check_optimizers(optimizer, parameters)
    tensors = [_info(name, parameter) for name, parameter in parameters.items()]
    made, policy = _plan(plan, tensors, ranks)
    made.check_against(tensors)
    return parameters, tensors, made, policy


def _plan(plan: Any, tensors: list[TensorInfo], ranks: int) -> tuple[Plan, Policy | None]:
    if isinstance(plan, str) and plan == "auto":
        raise PlanError(
            "plan is 'auto', and this version does not plan by itself yet. Pass plan=gw.QSGD(bits=4) for eight times fewer "
            "bytes, plan=gw.Identity() for exact sums, a gw.Policy, or a plan file."
        )
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(Path(plan))
    if isinstance(plan, Plan):
        executable(plan.schedule)
        return plan, None
    if isinstance(plan, Spec):
        plan = Uniform(plan)
    if not isinstance(plan, Policy):
        raise PlanError(
            f"plan is a {type(plan).__name__}: it must be a spec, a Policy, a Plan or the path of a plan file."
        )
    # before the first step the best guess is that gradients come in the reverse order of registration
    return plan.plan(tensors[::-1], ranks), plan


def _check_optimizers(optimizer: Any, parameters: dict[str, torch.nn.Parameter]) -> None:
    if optimizer is None:
        return
    ours = {id(parameter) for parameter in parameters.values()}
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if not hasattr(each, "param_groups"):
            raise PlanError(f"optimizer is a {type(each).__name__}: pass a torch optimizer or a list of them.")
        if not any(id(p) in ours for param_group in each.param_groups for p in param_group["params"]):
            raise PlanError(
                f"no parameter of this {type(each).__name__} is a trainable parameter of the model. Was it made for another "
                "copy, or before model.to(...)?"
            )


def _info(name: str, parameter: torch.nn.Parameter) -> TensorInfo:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(parameter.shape), dtype, "cpu" if parameter.device.type == "cpu" else "gpu")


def _facts(prepared: Prepared | None, problem: Exception | None) -> dict[str, Any]:
    """What ranks compare, most telling first."""
    if prepared is None:
        return {"error": f"{type(problem).__name__}: {problem}"}
    _, tensors, plan, policy = prepared
    return {
        "gradwire version": __version__,
        "torch version": torch.__version__,
        "model": [[t.name, list(t.shape), t.dtype, t.device] for t in tensors],
        "plan": policy.to_json(None) if policy is not None else f"{plan.digest()[:16]} {plan.buckets[0].spec!r}",
    }
