"""The flight recorder: what each lane of this rank did in the last steps. It is written when a step fails for good."""

import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from gradwire.core import Document

STEPS = 100
"""So many are kept."""


class FlightTask(NamedTuple):
    """One task of a lane, done or not."""

    what: str
    began_s: float
    """Seconds of the Unix clock, here and below."""
    ended_s: float
    """0: it had not ended."""


class FlightStep(NamedTuple):
    """One step of one rank."""

    step: int
    began_s: float
    tasks: list[FlightTask]


class FlightRecord(Document, frozen=True, kw_only=True):
    """The record that a rank wrote."""

    what = "flight record"
    remedy = "It is written by a rank whose step failed."

    rank: int
    ranks: list[int]
    """All of the group."""
    error: str
    written_s: float
    steps: list[FlightStep]


class Doing:
    """A task under way."""

    __slots__ = ("began_s", "ended_s", "what")

    def __init__(self, *what: object) -> None:
        self.what, self.began_s, self.ended_s = what, time.time(), 0.0

    def done(self) -> None:
        self.ended_s = time.time()


class Flight:
    """The flight recorder of the lanes of one group, on one rank."""

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str) -> None:
        """rank, ranks: as in messages. name: of the group."""
        self.rank, self.ranks, self._name = rank, ranks, name
        self._steps: deque[tuple[int, float, list[Doing]]] = deque(maxlen=STEPS)
        self._now: list[Doing] = []

    def begin(self, step: int) -> None:
        """A step begins."""
        self._now = []
        self._steps.append((step, time.time(), self._now))

    def doing(self, *what: object) -> Doing:
        """A lane begins a task. For any thread."""
        self._now.append(doing := Doing(*what))
        return doing

    def write(self, error: str) -> Path:
        """Write what is there to the folder `GRADWIRE_FLIGHT_DIR`, by default that of temporary files. Raises WriteError."""
        folder = Path(os.environ.get("GRADWIRE_FLIGHT_DIR") or tempfile.gettempdir())
        path = folder / f"gradwire-flight-{self._name}-rank{self.rank}.json"
        steps = [
            FlightStep(step, began_s, [FlightTask(" ".join(map(str, d.what)), d.began_s, d.ended_s) for d in [*tasks]])
            for step, began_s, tasks in self._steps
        ]
        record = FlightRecord(rank=self.rank, ranks=[*self.ranks], error=error, written_s=time.time(), steps=steps)
        record.save(path)
        return path
