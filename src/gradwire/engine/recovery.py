"""What all ranks do when one of them cannot make its step: `reset` after a void step, and a change of the model."""

from functools import partial

import torch

from gradwire.collectives import LinkError
from gradwire.engine.control import BackwardState, exchange_reports
from gradwire.engine.leaving import was_left
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.base import Launches
from gradwire.errors import GradwireError

__all__ = ["announce_change", "reset"]


@torch.no_grad()
def announce_change(reducer: Reducer) -> None:
    """Tell all ranks that this one's parameters changed. Returns when all said the same; raises on all when some ran
    a step instead, which is void."""
    reducer.lanes.check()
    for gradient, parameter in zip(reducer.gradients, reducer.living(), strict=False):
        if parameter is not None and parameter.grad is not None and parameter.grad is gradient.handed:
            parameter.grad = parameter.grad.clone()  # what was accumulated, before the slot is zeroed
        gradient.take_over(None)
    schedule = reducer.schedule
    schedule.on_begin()
    for flat in reducer.running.flats:
        flat.zero_()
    for index in range(len(reducer.slots)):
        reducer.count(index)
    reducer.hear(reducer.tell(BackwardState.CHANGED), schedule.on_end)
    reducer.running.finish()
    reducer.take_back_all()
    reducer.idle()


def reset(reducer: Reducer) -> None:
    """Begin anew after a void step. Collective."""
    schedule = reducer.schedule
    if isinstance(schedule, Launches):
        schedule.before_reset()
    if reducer.lanes.failure is None and reducer.in_hand:
        was_left(reducer, "reset() was called")
    if (failure := reducer.lanes.failure) is not None:
        _mend(reducer, failure)
    if isinstance(schedule, Launches):
        schedule.after_reset()


def _mend(reducer: Reducer, failure: GradwireError) -> None:
    lanes = reducer.lanes
    if not lanes.mendable:
        raise type(failure)(f"reset() cannot mend this: {failure}")
    lanes.mendable = False
    own = reducer.control.report(reducer.step, BackwardState.DONE, 0, 0)
    try:
        reports = lanes.control.submit(partial(exchange_reports, own, len(reducer.names))).result()
    except LinkError as error:
        raise reducer.broken("all ranks to call reset()", error) from error
    lanes.mend()
    reducer.idle(1 + max(report.step for report in reports))
    for parameter in reducer.living():
        if parameter is not None:
            parameter.grad = None
