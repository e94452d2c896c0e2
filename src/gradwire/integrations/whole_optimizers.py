"""Handles in frameworks that step, clip and save whole optimizers: plans with `shard_optimizer` are refused."""

from collections.abc import Mapping
from typing import Any

from gradwire.api import Handle, parallelize
from gradwire.errors import PlanError

__all__ = ["parallelize_whole", "refuse_later_steps", "refuse_shards"]


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
