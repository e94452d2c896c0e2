"""The schedules that the engine runs, and which optimizers they can run with."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gradwire.core import Plan, named, show
from gradwire.core import schedules as data
from gradwire.engine.prepare import Prepared
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.base import ScheduleEvents, TrainingJob, Traits
from gradwire.errors import PlanError


class ScheduleClass(Protocol):
    """A class that runs a schedule. `make_schedule` calls it."""

    def __call__(self, reducer: Reducer, schedule: Any, job: TrainingJob) -> ScheduleEvents:
        """`schedule` is the plan's: the data."""

    def check_optimizers(self, prepared: Prepared, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises PlanError where the plan's schedule cannot run with these optimizers. May be left out."""

    def why_not(self, job: TrainingJob) -> str:
        """Why the schedule gains nothing in this script; '' if nothing speaks against it. May be left out."""


def make_schedule(reducer: Reducer, schedule: data.Schedule, job: TrainingJob) -> ScheduleEvents:
    """Make the object that runs the steps of a plan with this schedule. Raises PlanError if its `engine` is no class, or lacks a
    part of `ScheduleEvents`."""
    engine = named(schedule.engine)
    if not callable(engine):
        raise PlanError(
            f"the engine of the schedule {schedule.word!r} is {show(engine)}: it must be the class that runs its steps, or the "
            "name of one as 'module:Class'."
        )
    made: ScheduleEvents = engine(reducer, schedule, job)
    methods = [name for name in vars(ScheduleEvents) if not name.startswith("_")]
    if missing := [name for name in ("traits", *methods) if not hasattr(made, name)]:
        raise PlanError(
            f"{type(made).__name__}, which runs the schedule {schedule.word!r}, has no {', '.join(missing)}: the engine calls "
            "every method of gradwire.engine.schedules.base.ScheduleEvents. Add what is missing."
        )
    return made


def check_optimizers(optimizer: Any, prepared: Prepared) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises PlanError for one that steps nothing of the model, for momentum with a spec that has its
    own, and for what the schedule cannot run with."""
    schedule = prepared.plan.schedule
    if not optimizer and schedule.needs_optimizer:
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
    if (check := getattr(named(schedule.engine), "check_optimizers", None)) is not None:
        check(prepared, optimizers)
    return optimizers


def traits_of(schedule: data.Schedule) -> Traits:
    """The traits of the object that would run this schedule."""
    traits: Traits = getattr(named(schedule.engine), "traits", Traits())
    return traits


def why_not_weighed(plan: Plan) -> str:
    """Why the plan's schedule cannot run in a script that gives batches weights; '' if it can."""
    if traits_of(plan.schedule).weighs_batches:
        return ""
    return f"the {plan.schedule.word} schedule does not weigh batches (handle.weight)"


def why_not(prepared: Prepared, job: TrainingJob) -> str:
    """Why the schedule of the prepared plan cannot run with these optimizers, or gains nothing with them; '' if it can."""
    try:
        check_optimizers(job.optimizers or None, prepared)
    except PlanError as error:
        return str(error)
    ask = getattr(named(prepared.plan.schedule.engine), "why_not", None)
    return str(ask(job)) if ask is not None else ""
