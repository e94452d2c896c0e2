"""Examines a job by its ranks: a roll call with a deadline, a gloo group, and the links one after another."""

import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from gradwire.doctor.facts import Facts
from gradwire.doctor.links import Direction, measure_link, ring_links, seconds_each
from gradwire.doctor.meeting import Job, Meeting, Say, bounded

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
