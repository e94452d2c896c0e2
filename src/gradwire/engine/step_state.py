"""The states of a reducer."""

from enum import Enum


class StepState(Enum):
    """Where a reducer is in its step."""

    IDLE = "idle"
    RUNNING = "running"
    CLOSING = "closing"
    VOID = "void"
    """All ranks raised; `reset` goes on."""
    BROKEN = "broken"
    """Nothing goes on."""
