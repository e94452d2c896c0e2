"""The ranks of a job meet: a roll call with a deadline, a gloo group, its links in turns, and the way out together.

Facts and results travel over the board, so that rank 0 hears of a rank even when gloo cannot reach it.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from gradwire.doctor.board import Board, bounded
from gradwire.doctor.facts import Facts
from gradwire.doctor.job import Job
from gradwire.doctor.links import Direction, link_seconds, measure_link, ring_links, seconds_each

__all__ = ["Meeting", "Survey"]

T = TypeVar("T")
_POLL_S = 0.02
_LATE_S = 5.0  # what may lie between two ranks' ends of one and the same thing


@dataclass
class Survey:
    """What rank 0 learned from all."""

    present: dict[int, Facts] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    """Ranks that did not come in time."""
    twice: list[int] = field(default_factory=list)
    """Ranks that more than one process says to be."""
    directions: list[Direction] = field(default_factory=list)
    """In the order of the ring."""
    unreachable: dict[int, str] = field(default_factory=dict)
    """By rank, why its gloo group could not be made."""
    silent: list[int] = field(default_factory=list)
    """Ranks that came, and did not tell what they measured."""
    stopped: str | None = None
    """Why rank 0 itself could not go on."""


class Meeting:
    """One rank's side of the meeting. Its calls end in time, and raise ConnectionError when the board is lost."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self.job, self.timeout_s = job, timeout_s
        self._links = ring_links(job.world_size)
        self._backend: Any = None

    @property
    def longest_s(self) -> float:
        """More than everything takes, also when every link hangs until its timeout."""
        return 10 * self.timeout_s + self._ring_s() + 60

    def _ring_s(self) -> float:
        return len(self._links) * (2 * self.timeout_s + link_seconds(self.job.world_size))

    def open(self) -> None:
        """Reach the board."""
        self._board = Board(self.job, self.timeout_s)

    def sign_in(self, facts: Facts) -> bool:
        """Leave this rank's facts. False if another process did so under the same rank."""
        first = self._board.count(f"count/{self.job.rank}") == 1
        if first:
            self._board.put(f"facts/{self.job.rank}", msgspec.json.encode(facts))
        return first

    def call_roll(self, say: Callable[[str], None]) -> Survey:
        """Rank 0: wait for everybody's facts, up to the timeout, and tell all who is missing."""
        world = range(self.job.world_size)
        facts, missing = self._gather("facts", world, self.timeout_s, Facts, say)
        twice = [rank for rank in world if self._board.count(f"count/{rank}", 0) > 1]
        self._board.put("missing", msgspec.json.encode(missing))
        return Survey(present=facts, missing=missing, twice=twice)

    def hear_roll(self) -> list[int]:
        """Other ranks: who is missing, as rank 0 says."""
        told = self._board.wait("missing", self.timeout_s + _LATE_S)
        if told is None:
            raise self._unheard(self.timeout_s)
        return msgspec.json.decode(told, type=list[int])

    def connect(self) -> None:
        """Every rank: make a gloo group, and tell how that went."""
        from gradwire.collectives.slices import short_slices  # torch may be what is wrong here

        problem = ""
        try:
            with short_slices():  # as the links of a training job have them
                self._backend = bounded(self._gloo, 2 * self.timeout_s)
        except Exception as error:
            problem = _reason(error)
        self._board.put(f"connected/{self.job.rank}", msgspec.json.encode(problem))

    def _gloo(self) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        limit = timedelta(seconds=self.timeout_s)
        store = PrefixStore("gloo", self._board.store)
        return ProcessGroupGloo(store, self.job.rank, self.job.world_size, limit)

    def check_connections(self, survey: Survey, say: Callable[[str], None]) -> bool:
        """Rank 0: whether gloo connected on all, into the survey, and told to all."""
        told, survey.silent = self._gather("connected", sorted(survey.present), 2 * self.timeout_s + _LATE_S, str, say)
        survey.unreachable = {rank: problem for rank, problem in sorted(told.items()) if problem}
        all_are = not survey.unreachable and not survey.silent
        self._board.put("all connected", msgspec.json.encode(all_are))
        return all_are

    def hear_of_connections(self) -> bool:
        """Other ranks: whether gloo connected on all, as rank 0 says."""
        patience_s = 3 * self.timeout_s + 2 * _LATE_S
        told = self._board.wait("all connected", patience_s)
        if told is None:
            raise self._unheard(patience_s)
        return msgspec.json.decode(told, type=bool)

    def measure(self) -> None:
        """Every rank: its links, when it is their turn. What the network does to it is told in the result."""
        from gradwire.collectives.slices import short_slices

        directions = []
        for turn, link in enumerate(self._links):
            if self.job.rank in link:
                if turn:
                    self._board.wait(f"turn/{turn}", self._ring_s())
                with short_slices():
                    directions.append(self._measured(link))
                self._board.put(f"turn/{turn + 1}", b"")
        self._board.put(f"result/{self.job.rank}", msgspec.json.encode(directions))

    def _measured(self, link: tuple[int, int]) -> Direction:
        """The direction that begins here."""
        rank = self.job.rank
        peer = link[0] if rank == link[1] else link[1]
        try:
            seconds = seconds_each(self.job.world_size)
            round_trip_us, gbps = measure_link(self._backend, peer, rank == link[0], seconds, self.timeout_s)
        except Exception as error:
            return Direction(source=rank, destination=peer, problem=_reason(error))
        return Direction(source=rank, destination=peer, round_trip_us=round_trip_us, gbps=gbps)

    def collect(self, survey: Survey, say: Callable[[str], None]) -> None:
        """Rank 0: what everybody measured, into the survey."""
        self._board.wait(f"turn/{len(self._links)}", self._ring_s())
        present = sorted(survey.present)
        results, survey.silent = self._gather("result", present, _LATE_S, list[Direction], say)
        survey.directions = [direction for directions in results.values() for direction in directions]
        place = {frozenset(link): turn for turn, link in enumerate(self._links)}
        survey.directions.sort(key=lambda d: place[frozenset((d.source, d.destination))])

    def dismiss(self, code: int, present: Iterable[int]) -> None:
        """Rank 0: let the others go, with the exit code for all; stay until they have heard it."""
        self._board.put("code", str(code).encode())
        others = [rank for rank in present if rank != self.job.rank]
        self._gather("bye", others, _LATE_S, int, lambda _: None)

    def hear_dismissal(self, patience_s: float) -> int:
        """Other ranks: the exit code."""
        told = self._board.wait("code", patience_s)
        if told is None:
            raise self._unheard(patience_s)
        self._board.put(f"bye/{self.job.rank}", b"0")
        return int(told)

    def close(self) -> None:
        """Free the gloo backend while the interpreter is whole. After a failed link this may wait for ever."""
        self._backend = None

    def _unheard(self, seconds: float) -> ConnectionError:
        return ConnectionError(
            f"rank {self.job.rank} heard nothing from rank 0 for {seconds:.0f} s. See rank 0's own log."
        )

    def _gather(
        self, what: str, ranks: Iterable[int], patience_s: float, kind: type[T], say: Callable[[str], None]
    ) -> tuple[dict[int, T], list[int]]:
        """What the ranks left under a name, and who left nothing in time."""
        missing, found, deadline = list(ranks), dict[int, T](), time.monotonic() + patience_s
        while True:
            for rank in list(missing):
                note = self._board.take(f"{what}/{rank}")
                if note is not None:
                    found[rank] = msgspec.json.decode(note, type=kind)
                    missing.remove(rank)
            if not missing or time.monotonic() > deadline:
                return found, missing
            say(f"waiting for {len(missing)} of {self.job.world_size} ranks: {_first(missing)}")
            time.sleep(_POLL_S)


def _first(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")


def _reason(error: BaseException) -> str:
    """What a backend said, without the place in its source."""
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip()) or type(error).__name__
