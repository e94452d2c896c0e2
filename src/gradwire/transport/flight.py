"""The flight recorder: what each lane of this rank did in the last steps. It is written when a step fails for good."""

import os
import stat
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gradwire.core import Document

STEPS = 100
"""The number of steps that are kept."""
FILES = 64
"""The number of files that are kept in the user's own folder."""


class FlightTask(NamedTuple):
    what: str
    began_s: float
    """Seconds of the Unix clock, here and below."""
    ended_s: float
    """0: it had not ended."""


class FlightStep(NamedTuple):
    step: int
    began_s: float
    tasks: list[FlightTask]


class FlightRecord(Document, frozen=True, kw_only=True):
    """The record that a rank wrote."""

    what = "flight record"
    private = True
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
        self._now = []
        self._steps.append((step, time.time(), self._now))

    def doing(self, *what: object) -> Doing:
        """A lane begins a task. For any thread."""
        self._now.append(doing := Doing(*what))
        return doing

    def write(self, error: str) -> Path:
        """Write what is there to the folder `GRADWIRE_FLIGHT_DIR`, by default one of this user's own among temporary files, where
        only the last ones stay. Raises WriteError."""
        own = os.environ.get("GRADWIRE_FLIGHT_DIR")
        folder = Path(own) if own else _own_folder()
        path = folder / f"gradwire-flight-{self._name}-rank{self.rank}.json"
        steps = [
            FlightStep(step, began_s, [FlightTask(" ".join(map(str, d.what)), d.began_s, d.ended_s) for d in [*tasks]])
            for step, began_s, tasks in self._steps
        ]
        record = FlightRecord(rank=self.rank, ranks=[*self.ranks], error=error, written_s=time.time(), steps=steps)
        record.save(path)
        if not own:
            _remove_old(folder)
        return path


def _own_folder() -> Path:
    """A folder that nobody else can write to, the same for all processes of this user if nobody took its name before."""
    folder = Path(tempfile.gettempdir()) / f"gradwire-flight-{os.geteuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="gradwire-flight-"))


def _remove_old(folder: Path) -> None:
    """Keep the last files."""
    with suppress(OSError):
        for path in sorted(folder.glob("gradwire-flight-*.json"), key=lambda each: each.stat().st_mtime)[:-FILES]:
            path.unlink()
