"""What all ranks do when one of them cannot make its step: its end, in order, `reset` after it, and a change of the model."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import torch

from gradwire.engine.control import BackwardState, ControlExchange, RankReport, exchange_reports
from gradwire.engine.gradients import AnyGradient
from gradwire.engine.schedules.base import Launches, ScheduleEvents
from gradwire.engine.torch_hooks.arrivals import Arrivals
from gradwire.engine.torch_hooks.stepping import is_of_script
from gradwire.errors import GradwireError, StepStateError
from gradwire.exchange import Exchange, Slot
from gradwire.transport import Lanes

T = TypeVar("T")


class LeavableStep(Protocol):
    """The part of a reducer that ends a step out of order."""

    lanes: Lanes
    control: ControlExchange
    arrivals: Arrivals
    running: Exchange
    step: int
    names: list[str]
    slots: list[Slot]
    gradients: list[AnyGradient]

    @property
    def schedule(self) -> ScheduleEvents: ...
    @property
    def in_hand(self) -> bool: ...
    def begin_by_schedule(self) -> None: ...
    def put(self, index: int, gradient: torch.Tensor | None) -> None: ...
    def send(self, *indices: int) -> None: ...
    def unsent(self) -> list[int]: ...
    def tell(self, state: BackwardState) -> "Future[list[RankReport]]": ...
    def hear(
        self, told: "Future[list[RankReport]]", wait: "Callable[[Future[list[RankReport]]], None]"
    ) -> list[RankReport]: ...
    def take_back_all(self) -> None: ...
    def living(self) -> list[torch.nn.Parameter | None]: ...
    def idle(self, next_step: int | None = None) -> None: ...


def told_to_all(act: Callable[..., T], script_steps: bool = False) -> Callable[..., T]:
    """For methods of reducers and schedules that are gradwire's own part of a step. Where it fails (memory is short), nobody
    knows how much was done, and `leave` could wait for ever: so the step fails on all ranks, with the reason. `script_steps`:
    the script calls it by `optimizer.step()`, and what its optimizer raises is its own affair."""

    @wraps(act)
    def told(owner: Any, *arguments: Any) -> T:
        try:
            return act(owner, *arguments)
        except GradwireError:
            raise
        except BaseException as error:
            if script_steps and is_of_script(error):
                raise
            reducer: LeavableStep = getattr(owner, "_reducer", owner)
            failed = reducer.lanes.failed_here("the step", error, reducer.step)
            if isinstance(error, Exception):
                raise failed from error
            raise

    return told


def was_left(reducer: LeavableStep, what_now: str) -> GradwireError:
    """End the step of a backward that was left. Returns the error to raise here."""
    return leave(
        reducer,
        f"{what_now}, but step {reducer.step} of the last backward is not finished: {len(reducer.arrivals.came)} of "
        f"{len(reducer.names)} gradients came, then it was left (an exception in it?). All ranks raise and none may use "
        "this step's gradients: call handle.reset() on all of them and go on with the next batch, or restart.",
    )


def not_sent(reducer: LeavableStep, index: int, grad: torch.Tensor | None) -> GradwireError:
    """End the step of a gradient that cannot be sent: it is gone, or sparse. Returns the error to raise here."""
    reducer.arrivals.came.pop(index, None)
    gone = (
        "was gone when it was to be sent: a hook used it and set it to None (an optimizer in backward?). gradwire averages "
        "after all hooks; step the optimizer after backward."
    )
    sparse = "is sparse; gradwire sends dense gradients. Use Embedding(..., sparse=False)."
    return leave(reducer, f"the gradient of {reducer.names[index]!r} {gone if grad is None else sparse}")


def taken_in_backward(reducer: LeavableStep, name: str, optimizer: str) -> GradwireError:
    """End the step of a backward in which a script steps an optimizer. Returns the error to raise here."""
    words = (
        f"{optimizer}.step() was called inside backward and takes the gradient of {name!r} before its exchange has ended: each "
        "rank would step by its own gradient, and weights would drift apart. Step the optimizer after backward."
    )
    if not reducer.schedule.traits.sends_in_backward:
        return StepStateError(words)
    reducer.lanes.check()
    if not reducer.in_hand:
        reducer.begin_by_schedule()
    return leave(reducer, words)


def came_twice(reducer: LeavableStep, index: int) -> GradwireError:
    """End the step of a backward in which a parameter is used inside a reentrant checkpoint and outside. Returns the error."""
    return leave(
        reducer,
        f"the gradient of {reducer.names[index]!r} became ready twice in step {reducer.step}: it is used inside a "
        "reentrant checkpoint and outside of it. Use checkpoint(..., use_reentrant=False).",
    )


@torch.no_grad()
def leave(reducer: LeavableStep, words: str) -> GradwireError:
    """End the step with zeros for what is missing, and tell all ranks. Returns the error to raise here."""
    for index in reducer.unsent():
        if reducer.gradients:
            reducer.gradients[index].take_over(None)
        reducer.put(index, None)
        reducer.send(index)
    mendable = False
    with suppress(Exception):  # where ranks are gone too, this rank's own words matter more
        mendable = reducer.running.finish_quietly(reducer.tell(BackwardState.LEFT))
    reducer.take_back_all()
    return reducer.lanes.fail(StepStateError(words), mendable)


@told_to_all
@torch.no_grad()
def announce_change(reducer: LeavableStep) -> None:
    """Tell all ranks that this one's parameters changed. Returns when all said the same; raises on all when some ran
    a step instead, which is void."""
    reducer.lanes.check()
    for gradient, parameter in zip(reducer.gradients, reducer.living(), strict=False):
        if parameter is not None and parameter.grad is not None and parameter.grad is gradient.handed:
            parameter.grad = parameter.grad.clone()  # what was accumulated, before the slot is zeroed
        gradient.take_over(None)
    reducer.begin_by_schedule()
    for index in range(len(reducer.slots)):
        reducer.put(index, None)
        reducer.send(index)
    reducer.hear(reducer.tell(BackwardState.CHANGED), reducer.schedule.on_end)
    reducer.running.wait()
    reducer.take_back_all()
    reducer.idle()


@told_to_all
def reset(reducer: LeavableStep) -> None:
    """Begin anew after a void step. Collective."""
    schedule = reducer.schedule
    if isinstance(schedule, Launches):
        schedule.before_reset()
    if reducer.lanes.failure is None:
        # a forward or a backward that raised before its first gradient: other ranks run the step that this rank leaves
        if reducer.arrivals.awaited and not reducer.in_hand and schedule.traits.sends_in_backward:
            reducer.begin_by_schedule()
        if reducer.in_hand:
            was_left(reducer, "reset() was called")
    if (failure := reducer.lanes.failure) is not None:
        _mend(reducer, failure)
    if isinstance(schedule, Launches):
        schedule.after_reset()


def _mend(reducer: LeavableStep, failure: GradwireError) -> None:
    lanes = reducer.lanes
    if not lanes.mendable:
        raise type(failure)(f"reset() cannot mend this: {failure}")
    lanes.mendable = False
    own = reducer.control.report(reducer.step, BackwardState.DONE, 0, ())
    with lanes.told("all ranks to call reset()", reducer.step):
        reports = lanes.control.submit(partial(exchange_reports, own, len(reducer.names))).result()
    lanes.mend()
    reducer.idle(1 + max(report.step for report in reports))
    for parameter in reducer.living():
        if parameter is not None:
            parameter.grad = None
