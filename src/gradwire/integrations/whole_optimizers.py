"""Handles in frameworks that step, clip and save whole optimizers: plans with `shard_optimizer` are refused."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.api import Handle, parallelize
from gradwire.errors import PlanError

__all__ = ["heed_options_of_ddp", "parallelize_whole", "refuse_later_steps", "refuse_shards"]


def heed_options_of_ddp(options: Any, model: torch.nn.Module) -> None:
    """Heed Accelerate's `DistributedDataParallelKwargs`, if there are any, before a model is parallelized.

    With `broadcast_buffers=False` each rank keeps its own buffers, from the start. The other options say how DDP sends. Raises
    PlanError for a communication hook.
    """
    if options is None:
        return
    if (hook := next((each for each in (options.comm_hook, options.comm_wrapper) if each.value != "no"), None)) is not None:
        raise PlanError(
            f"DistributedDataParallelKwargs asks for the hook {hook.value!r}, and gradwire sends gradients in place of "
            "DDP. Leave the hook out, and pass a plan: gw.Cast() sends 16 bits, gw.PowerSGD() low ranks."
        )
    if not options.broadcast_buffers:
        ignored: list[str] = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ())]
        ignored += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def refuse_shards(plan: Any, framework: str) -> None:
    """Raises PlanError for a plan or policy with `shard_optimizer`."""
    schedule = getattr(plan, "schedule", None)
    if getattr(schedule, "shards_optimizer", False):
        raise PlanError(
            f"plan has the schedule {schedule!r}: each rank has a shard of the optimizer's state, and {framework} saves that of "
            "rank 0. Leave shard_optimizer out, or run gw.parallelize in a loop of your own."
        )


def refuse_later_steps(handle: Handle, module: Any, precision: Any) -> None:
    """Detach the handle and raise PlanError, on all ranks, if its schedule steps parameters after `optimizer.step()` and
    Lightning runs backward inside. That is in a module's automatic optimization, unless the precision plugin has a GradScaler."""
    schedule = handle.session.plan.schedule
    steps_inside = module.automatic_optimization and getattr(precision, "scaler", None) is None
    if steps_inside and schedule.needs_optimizer and not schedule.sends_weights:
        handle.detach()
        raise PlanError(
            f"plan has the schedule {schedule!r}, which steps parameters after optimizer.step(). Lightning's automatic "
            "optimization runs backward inside that step. Use a plan with schedule='backward' or gw.LocalSteps(). Or set "
            "automatic_optimization = False in the module, and step self.optimizers(use_pl_optimizer=False)."
        )


def parallelize_whole(model: Any, optimizer: Any, plan: Any, options: Mapping[str, Any], framework: str) -> Handle:
    """`gw.parallelize` with a plan that `refuse_shards` let pass. One that a file or a function brings may have shards: it is
    refused on all ranks."""
    handle = parallelize(model, optimizer, plan=plan, **options)
    try:
        refuse_shards(handle.session.plan, framework)
    except PlanError:
        handle.detach()
        raise
    return handle
