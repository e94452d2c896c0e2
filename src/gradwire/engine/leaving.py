"""Ending, in order, a step whose backward was left in the middle."""

import contextlib
from typing import TYPE_CHECKING

import torch

from gradwire.engine.control import BackwardState
from gradwire.errors import GradwireError, StepStateError

if TYPE_CHECKING:
    from gradwire.engine.reducer import Reducer

__all__ = ["leave", "was_left"]


def was_left(reducer: "Reducer", what_now: str) -> GradwireError:
    """End the step of a backward that was left. Returns the error to raise here."""
    return leave(
        reducer,
        f"{what_now}, but step {reducer.step} of the last backward is not finished: {len(reducer.filled)} of "
        f"{len(reducer.names)} gradients came, then it was left (an exception in it?). All ranks raise and none may use "
        "this step's gradients: call handle.reset() on all of them and go on with the next batch, or restart.",
    )


@torch.no_grad()
def leave(reducer: "Reducer", words: str) -> GradwireError:
    """End the step with zeros for what is missing, and tell all ranks. Returns the error to raise here."""
    for index in range(len(reducer.slots)):
        if index not in reducer.sent:
            if reducer.gradients:
                reducer.gradients[index].take_over(None)
            reducer.put(index, None)
            reducer.count(index)
    mendable = False
    with contextlib.suppress(Exception):  # where ranks are gone too, this rank's own words matter more
        reducer.running.executor.finish(reducer.tell(BackwardState.LEFT))
        mendable = True
    reducer.take_back_all()
    return reducer.lanes.fail(StepStateError(words), mendable)
