"""Handles in frameworks that step, clip and save whole optimizers: plans with `shard_optimizer` are refused."""

from collections.abc import Mapping
from typing import Any

from gradwire.api import Handle, parallelize
from gradwire.errors import PlanError

__all__ = ["parallelize_whole", "refuse_shards"]


def refuse_shards(plan: Any, framework: str) -> None:
    """Raises PlanError for a plan or policy with `shard_optimizer`."""
    schedule = getattr(plan, "schedule", None)
    if getattr(schedule, "shards_optimizer", False):
        raise PlanError(
            f"plan has the schedule {schedule!r}: each rank has a shard of the optimizer's state, and {framework} saves that of "
            "rank 0. Leave shard_optimizer out, or run gw.parallelize in a loop of your own."
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
