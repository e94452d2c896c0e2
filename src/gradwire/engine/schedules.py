"""Which class runs a plan's schedule, whether it can in this script, and how one takes over from another."""

from collections.abc import Callable, Sequence

import torch

from gradwire.collectives import Group, Lane
from gradwire.core.schedules import Delayed as DelayedSchedule
from gradwire.core.schedules import Pipelined as PipelinedSchedule
from gradwire.core.schedules import Schedule
from gradwire.engine.backward import Backward
from gradwire.engine.delayed import Delayed
from gradwire.engine.failure import RollCall
from gradwire.engine.pipelined import Pipelined
from gradwire.engine.prepare import Prepared, check_optimizers
from gradwire.engine.sharded import Sharded
from gradwire.engine.splitting import why_whole
from gradwire.engine.step import Steps
from gradwire.errors import PlanError

__all__ = ["Common", "steps_of", "successor", "why_not"]

Common = tuple[Group, Lane, RollCall, int]
"""What all schedules need: the group, the control lane, the roll call, and the steps between comparisons of weights."""


def steps_of(
    schedule: Schedule,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    common: Common,
    compiled_before: int,
) -> Steps:
    """What runs the steps of a handle. `optimizers` may be empty where the schedule leaves them alone. `compiled_before` is what
    `compiled_frames` returned before the model was parallelized."""
    if isinstance(schedule, PipelinedSchedule):
        return (Sharded if schedule.shard_optimizer else Pipelined)(*common, model, optimizers, compiled_before)
    if isinstance(schedule, DelayedSchedule):
        return Delayed(*common, schedule, model, optimizers[0])
    return Backward(*common)


def why_not(
    prepared: Prepared,
    model: torch.nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    compiled_before: int,
) -> str:
    """Why the schedule of the prepared plan cannot run with these optimizers, or gains nothing with them; '' if it can."""
    try:
        check_optimizers(optimizers or None, prepared)
    except PlanError as error:
        return str(error)
    if not isinstance(prepared.plan.schedule, PipelinedSchedule):
        return ""
    return next(filter(None, (why_whole(optimizer, model, compiled_before) for optimizer in optimizers)), "")


def successor(old: Steps, make: Callable[[], Steps]) -> Steps:
    """Steps that go on where others, of which nothing is under way, end; these leave the model. `watch` and `attach` must
    follow."""
    old.detach()
    new = make()
    new.step, new.active, new.drift = old.step, old.active, old.drift
    new.synchronise, new.joining = old.synchronise, old.joining
    new.on_begin, new.on_finished, new.on_measured = old.on_begin, old.on_finished, old.on_measured
    return new
