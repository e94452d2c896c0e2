"""The lines that the worker prints after each step, and the runner reads."""

import contextlib

import msgspec

PREFIX = "gradwire-bench "


class StepEvent(msgspec.Struct, frozen=True):
    """One step of one method on rank 0."""

    method: str
    step: int
    us: float
    loss: float


def print_event(event: StepEvent) -> None:
    """Print the event as one line.

    >>> print_event(StepEvent("ddp", 3, 120000.0, 2.5))
    gradwire-bench {"method":"ddp","step":3,"us":120000.0,"loss":2.5}
    """
    print(PREFIX + msgspec.json.encode(event).decode(), flush=True)


def parse_event(line: str) -> StepEvent | None:
    """The event in a line; None for any other line."""
    if line.startswith(PREFIX):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line[len(PREFIX) :], type=StepEvent)
    return None
