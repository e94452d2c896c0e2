"""`parallelize`: from a model and a plan to a handle."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collectives import Grid, Group, Lane, Link, LinkError, node_name
from gradwire.core.checks import show, whole
from gradwire.core.plan import Plan
from gradwire.core.specs import Spec
from gradwire.engine.agreement import agree, gather_bytes
from gradwire.engine.driven import FirstDriver
from gradwire.engine.failure import RollCall
from gradwire.engine.handle import Handle
from gradwire.engine.prepare import check_optimizers, facts, prepare
from gradwire.engine.registry import REGISTRY
from gradwire.errors import CommunicationError, PlanError, StepStateError
from gradwire.planner.adaptive import AdaptiveBits
from gradwire.planner.policy import Policy
from gradwire.planner.tuned import Tuned

__all__ = ["parallelize"]

CPU_LANES = 2
"""A lane blocks in its collectives on CPU: while one waits for the wire the other encodes."""


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | Policy | Spec | AdaptiveBits | Tuned | str | os.PathLike[str] = "auto",
    process_group: dist.ProcessGroup | None = None,
    drift_check_steps: int = 1000,
    accuracy: str = "safe",
    schedules: Sequence[str] = ("backward",),
) -> Handle:
    """Synchronise the gradients of `model` over the ranks of `process_group` (default: all), in place.

    Nothing is wrapped and no state_dict key changes. All ranks get rank 0's parameters and buffers. From then on
    `grad` holds the mean gradient when `backward()` returns, whatever optimizer uses it. Collective: every rank of the
    group calls it at the same point.

    plan: "auto" measures the job, the links and the codecs in the first steps, tries the most promising plans beside plain
    all-reduce, keeps what was fastest, and looks again when times change; what it decided it logs in one line and keeps in
    `handle.decision`. Otherwise a spec (`gw.QSGD(bits=4)` for every tensor), a `gw.Policy`, a `gw.Plan`, the path of a plan's
    JSON file, `gw.AdaptiveBits()`, or `gw.Tuned(policy)`, which finds the best size of buckets.
    optimizer: the optimizer, or several, that will step the model. The `backward` schedule only checks it; the others need
    it, since they decide when parameters are stepped.
    drift_check_steps: every so many steps ranks compare checksums of their weights, and all raise DisagreementError with
    the first tensor that differs; 0 never.
    accuracy: what "auto" may choose from. "exact": uncompressed exchange; "safe": also what ends within 3 % of plain DDP's
    loss in docs/compressors.md; "aggressive": PowerSGD, EF-SignSGD and Top-k 1 % too.
    schedules: those that "auto" may choose from: "backward", and where the script allows what docs/schedules.md says
    "pipelined" (which costs no accuracy) and "delayed" (not in the class "exact"). What they would gain is said in any case.

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
    driver: FirstDriver | None = None
    control = Lane(f"gradwire-{name}-control", Link(group, f"{name}/control", torch.device("cpu"), timeout))
    try:
        what = "steps from one comparison of weights to the next, 0 for never"
        whole("drift_check_steps", drift_check_steps, what, error=PlanError)
        driver = driver_of(plan, accuracy, schedules)
        prepared, problem = prepare(model, driver.first_policy if driver else plan, group.world_size), None
        optimizers = check_optimizers(optimizer, prepared)
        if driver is not None and prepared.plan.shards_optimizer:
            raise PlanError(
                f"plan is {show(plan)}, which changes buckets while training, and the schedule has shard_optimizer: shards of "
                "the optimizer's state would have to move between ranks. Pass the policy or a plan itself."
            )
    except Exception as error:
        prepared, problem, optimizers = None, error, []
    told = facts(prepared, problem) | {"drift_check_steps": repr(drift_check_steps), "driver": repr(driver)}
    lanes: list[Lane] = []
    try:
        control.submit(lambda link: agree(link, told, group.global_ranks)).result()
        if problem is not None:
            raise problem
        names = control.submit(lambda link: gather_bytes(link, node_name().encode())).result()
        group = replace(group, grid=Grid.of([name.decode() for name in names], group.rank))
        assert prepared is not None
        device = next(iter(prepared.parameters.values())).device
        for index in range(CPU_LANES if device.type == "cpu" else 1):
            lanes.append(Lane(f"gradwire-{name}-{index}", Link(group, f"{name}/{index}", device, timeout)))
        roll_call = RollCall(group, name)
        engine = (group, lanes, control, roll_call, drift_check_steps)
        handle = Handle(model, prepared, optimizers, *engine)
    except BaseException as error:
        for lane in [*lanes, control]:
            lane.stop()
        if problem is None and isinstance(error, LinkError):
            raise CommunicationError(
                f"parallelize on rank {group.global_ranks[group.rank]}: ranks could not compare models and plans: one died, "
                f"stalled or did not call parallelize; see its own log. (The backend said: {error})"
            ) from error
        raise (problem if problem is not None else error) from None
    handle.driver = driver
    REGISTRY.add(model, prepared.parameters.values(), handle)
    _forget_compiled_code()
    return handle


def driver_of(plan: Any, accuracy: str, schedules: Sequence[str]) -> "FirstDriver | None":
    """Who decides what is run; None where the user did. Raises PlanError for wrong words."""
    if isinstance(plan, str) and plan == "auto":
        from gradwire.auto.driver import Auto

        return Auto(accuracy, tuple(schedules))
    if isinstance(plan, AdaptiveBits):
        from gradwire.auto.bits import Bits

        return Bits(plan)
    if isinstance(plan, Tuned):
        from gradwire.auto.tuning import Tuning

        return Tuning(plan)
    return None


def _forget_compiled_code() -> None:
    """Code that torch.compile made before does not notice hooks made since: it would run without them."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"].get("ok"):
        dynamo.reset()
