"""Lets the ranks of a job meet: a roll call with a deadline, a gloo group, and the links one after another.

Ranks exchange notes in the store at MASTER_ADDR:MASTER_PORT. Every call ends within its timeout.
The store's own timeouts fail if its host process is stopped, so a thread makes each call and is abandoned if it hangs. The
store also works where gloo cannot reach a rank.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from gradwire.doctor.differences import rank_list
from gradwire.doctor.facts import Facts
from gradwire.doctor.links import Direction, measure_link, ring_links, seconds_each

T = TypeVar("T")
Say = Callable[[str], None]
"""A function that shows the current activity."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARGIN_S = 5.0
_SLICE_S = 0.5


@dataclass(frozen=True)
class Job:
    """The variables that a launcher, such as torchrun, sets for each rank."""

    rank: int
    world_size: int
    address: str
    port: int
    store_is_launchers: bool
    """Whether torchrun hosts the store. Otherwise rank 0 hosts the store."""
    attempt: str

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Job | None":
        """Read this process's job from its environment; None if there is none. Raises ValueError for inconsistent variables."""
        present = [name for name in _NEEDED if environ.get(name)]
        if not {"RANK", "WORLD_SIZE"} & set(present):
            return None
        if missing := [name for name in _NEEDED if name not in present]:
            raise ValueError(f"{', '.join(present)} set, but not {', '.join(missing)}")
        rank, world_size, port = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks count from 0")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT is {port}, which is no port")
        launchers = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Job(rank, world_size, environ["MASTER_ADDR"], port, launchers, attempt)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, which is no number")
    return int(text)


def bounded(function: Callable[[], T], seconds: float) -> T:
    """Call the function in a daemon thread. Raises TimeoutError after `seconds` and abandons the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gradwire-doctor", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no end after {seconds:.0f} s")
    return future.result()


class Meeting:
    """One rank's side of the meeting. Calls raise ConnectionError if the host of the store is gone."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        """Connect to the store within the timeout. Rank 0 hosts the store unless the launcher does."""
        self.job, self.timeout_s = job, timeout_s
        self._host = "torchrun on the first node" if job.store_is_launchers else "rank 0"
        self._place = f"the meeting point of the ranks at {job.address}:{job.port}"
        hosts = job.rank == 0 and not job.store_is_launchers
        try:
            self.store = bounded(lambda: self._reach(hosts), timeout_s + _MARGIN_S)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            place = f"{self._place} (MASTER_ADDR:MASTER_PORT)"
            said = next(iter(str(error).strip().splitlines()), "no reason was given")
            raise ConnectionError(
                f"rank 0 cannot open {place}. Is that an address of this machine, and does another program, or a second "
                f"rank 0, hold the port? ({said})"
                if hosts
                else f"rank {job.rank} did not reach {place} within {timeout_s:g} s: {self._why_not_reached()}. ({said})"
            ) from error

    def _why_not_reached(self) -> str:
        with suppress(TimeoutError):
            try:
                bounded(lambda: socket.getaddrinfo(self.job.address, self.job.port), _MARGIN_S)
            except (socket.gaierror, UnicodeError):
                return (
                    f"this machine cannot look up the name {self.job.address}. Give torchrun --local-addr with the machine's own "
                    "address, on every machine. With another launcher set MASTER_ADDR to an address"
                )
        return f"{self._host} did not come, or the address is wrong or behind a firewall"

    def _reach(self, hosts: bool) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

        limit, job = timedelta(seconds=self.timeout_s), self.job
        store = TCPStore(job.address, job.port, job.world_size, hosts, limit, wait_for_workers=False)
        return PrefixStore(f"gradwire-doctor/{job.attempt}", store)

    def count(self, name: str, more: int = 1) -> int:
        return self._ask(lambda: int(self.store.add(name, more)))

    def write_note(self, what: str, note: object, number: int | None = None) -> None:
        """Write a note under this rank's number, or under another number."""
        name = f"{what}/{self.job.rank if number is None else number}"
        self._ask(lambda: self.store.set(name, msgspec.json.encode(note)))

    def read_notes(
        self, what: str, ranks: Iterable[int], kind: type[T], patience_s: float, say: Say = lambda text: None
    ) -> dict[int, T]:
        """Return the notes of the ranks by rank. Ranks that wrote no note in time are missing."""
        from torch.distributed import DistStoreError

        names = {rank: f"{what}/{rank}" for rank in ranks}
        found: dict[int, T] = {}
        deadline = time.monotonic() + patience_s

        def look(missing: list[int], seconds: float) -> dict[int, bytes]:
            with suppress(DistStoreError):  # some notes are missing still
                self.store.wait([names[rank] for rank in missing], timedelta(seconds=seconds))
            return {rank: self.store.get(names[rank]) for rank in missing if self.store.check([names[rank]])}

        while missing := [rank for rank in names if rank not in found]:
            say(f"waiting for {rank_list(missing)} of {self.job.world_size}")
            seconds = min(_SLICE_S, max(0.01, deadline - time.monotonic()))  # the store takes 0 for no limit
            notes = self._ask(lambda missing=missing, seconds=seconds: look(missing, seconds))  # type: ignore[misc]
            found |= {rank: msgspec.json.decode(note, type=kind) for rank, note in notes.items()}
            if time.monotonic() > deadline:
                break
        return found

    def read_rank_0(self, what: str, kind: type[T], patience_s: float) -> T:
        found = self.read_notes(what, [0], kind, patience_s)
        if not found:
            raise ConnectionError(f"rank {self.job.rank} received nothing from rank 0 for {patience_s:.0f} s. See its log.")
        return found[0]

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self.timeout_s + _SLICE_S)
        except (TimeoutError, RuntimeError) as error:
            how = "hangs" if isinstance(error, TimeoutError) else "has ended"
            raise ConnectionError(
                f"rank {self.job.rank}: {self._place} does not answer any more: the process that hosts it ({self._host}) "
                f"{how}. See its log."
            ) from error


LATE_S = 5.0  # the largest delay between two ranks at the end of a phase


@dataclass
class Survey:
    """The results at rank 0. Other ranks know only the missing ranks."""

    present: dict[int, Facts] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    """Ranks that did not come in time."""
    twice: list[int] = field(default_factory=list)
    """Ranks that several processes claim."""
    directions: list[Direction] = field(default_factory=list)
    """The measured directions, in the order of the ring."""
    unreachable: dict[int, str] = field(default_factory=dict)
    """The reason why a rank could not join the gloo group, by rank."""
    silent: list[int] = field(default_factory=list)
    """Ranks that came but reported no measurements."""
    stopped: str | None = None
    """The reason why rank 0 stopped; None if it did not."""


def _link_s(world_size: int, timeout_s: float) -> float:
    """Return an upper bound of the time for one link, in seconds: for a link of 1 Mb/s and a lost message."""
    return 8 * seconds_each(world_size) + 5 + 2 * timeout_s


def longest_s(world_size: int, timeout_s: float) -> float:
    """Return an upper bound of the time for the whole survey, in seconds, even if every link times out."""
    return 10 * timeout_s + world_size * _link_s(world_size, timeout_s) + 60


def take_part(job: Job, timeout_s: float, facts: Facts, survey: Survey, say: Say = lambda text: None) -> Meeting:
    """Run this rank's part of the survey and fill in `survey`. Raises ConnectionError if the store is lost."""
    meeting = Meeting(job, timeout_s)
    if meeting.count(f"count/{job.rank}") > 1:
        raise ConnectionError(f"another process is already rank {job.rank}; this process ends.")
    meeting.write_note("facts", facts)
    if job.rank == 0:
        survey.present = meeting.read_notes("facts", range(job.world_size), Facts, timeout_s, say)
        survey.missing = [rank for rank in range(job.world_size) if rank not in survey.present]
        survey.twice = [rank for rank in range(job.world_size) if meeting.count(f"count/{rank}", 0) > 1]
        meeting.write_note("missing", survey.missing)
    else:
        survey.missing = meeting.read_rank_0("missing", list[int], timeout_s + LATE_S)
    if survey.missing:
        return meeting
    meeting.write_note("connected", _connect(meeting))
    if job.rank == 0:
        problems = meeting.read_notes("connected", survey.present, str, 2 * timeout_s + LATE_S, say)
        survey.silent = [rank for rank in survey.present if rank not in problems]
        survey.unreachable = {rank: problem for rank, problem in sorted(problems.items()) if problem}
        connected = not survey.unreachable and not survey.silent
        meeting.write_note("all connected", connected)
    else:
        connected = meeting.read_rank_0("all connected", bool, 3 * timeout_s + 2 * LATE_S)
    if not connected:
        return meeting
    say("measuring the links, one after another")
    _measure(meeting)
    if job.rank == 0:
        ring = ring_links(job.world_size)
        meeting.read_notes("turn", [len(ring)], bool, len(ring) * _link_s(job.world_size, timeout_s))
        results = meeting.read_notes("result", survey.present, list[Direction], LATE_S, say)
        survey.silent = [rank for rank in survey.present if rank not in results]
        survey.directions = [direction for directions in results.values() for direction in directions]
        place = {frozenset(link): turn for turn, link in enumerate(ring)}
        survey.directions.sort(key=lambda d: place[frozenset((d.source, d.destination))])
    return meeting


def _connect(meeting: Meeting) -> str:
    """Make the gloo group of all ranks. Returns the error, or ''."""
    import torch.distributed as dist  # torch may be missing

    from gradwire.transport import short_slices

    job, limit = meeting.job, timedelta(seconds=meeting.timeout_s)

    def join() -> None:
        with short_slices():  # a training job limits its links' slices too
            size = job.world_size
            dist.init_process_group("gloo", store=meeting.store, rank=job.rank, world_size=size, timeout=limit)

    try:
        bounded(join, 2 * meeting.timeout_s)
    except Exception as error:
        return _reason(error)
    return ""


def _measure(meeting: Meeting) -> None:
    """Measure this rank's links in turn. Errors are part of the result."""
    from gradwire.transport import short_slices

    rank, world_size = meeting.job.rank, meeting.job.world_size
    seconds, longest_s = seconds_each(world_size), _link_s(world_size, meeting.timeout_s)
    directions = []
    for turn, link in enumerate(ring_links(world_size)):
        if rank not in link:
            continue
        if turn:
            meeting.read_notes("turn", [turn], bool, turn * longest_s)
        peer = link[0] if rank == link[1] else link[1]
        try:
            with short_slices():
                round_trip_us, gbps = bounded(partial(measure_link, peer, rank == link[0], seconds), longest_s)
            directions.append(Direction(source=rank, destination=peer, round_trip_us=round_trip_us, gbps=gbps))
        except Exception as error:
            directions.append(Direction(source=rank, destination=peer, problem=_reason(error)))
        meeting.write_note("turn", True, turn + 1)  # written by the first of the two ranks
    meeting.write_note("result", directions)


def _reason(error: BaseException) -> str:
    """Return the message of a backend without the source location."""
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip()) or type(error).__name__
