"""The examination of a job by its ranks: a roll call with a deadline, a gloo group, and the links one after another."""

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
    """In the order of the ring."""
    unreachable: dict[int, str] = field(default_factory=dict)
    """By rank, why the rank could not join the gloo group."""
    silent: list[int] = field(default_factory=list)
    """Ranks that came but reported no measurements."""
    stopped: str | None = None
    """Why rank 0 stopped."""


def _link_s(world_size: int, timeout_s: float) -> float:
    """An upper bound for one link, for a link of 1 Mb/s and for a lost message."""
    return 8 * seconds_each(world_size) + 5 + 2 * timeout_s


def longest_s(world_size: int, timeout_s: float) -> float:
    """An upper bound for the whole survey, even if every link times out."""
    return 10 * timeout_s + world_size * _link_s(world_size, timeout_s) + 60


def take_part(job: Job, timeout_s: float, facts: Facts, survey: Survey, say: Say = lambda text: None) -> Meeting:
    """Take part in the survey, as every rank does, and fill it in. Raises ConnectionError if the store is lost."""
    meeting = Meeting(job, timeout_s)
    if meeting.count(f"count/{job.rank}") > 1:
        raise ConnectionError(f"another process is already rank {job.rank}; this process ends.")
    meeting.tell("facts", facts)
    if job.rank == 0:
        survey.present = meeting.hear("facts", range(job.world_size), Facts, timeout_s, say)
        survey.missing = [rank for rank in range(job.world_size) if rank not in survey.present]
        survey.twice = [rank for rank in range(job.world_size) if meeting.count(f"count/{rank}", 0) > 1]
        meeting.tell("missing", survey.missing)
    else:
        survey.missing = meeting.hear_rank_0("missing", list[int], timeout_s + LATE_S)
    if survey.missing:
        return meeting
    meeting.tell("connected", _connect(meeting))
    if job.rank == 0:
        told = meeting.hear("connected", survey.present, str, 2 * timeout_s + LATE_S, say)
        survey.silent = [rank for rank in survey.present if rank not in told]
        survey.unreachable = {rank: problem for rank, problem in sorted(told.items()) if problem}
        connected = not survey.unreachable and not survey.silent
        meeting.tell("all connected", connected)
    else:
        connected = meeting.hear_rank_0("all connected", bool, 3 * timeout_s + 2 * LATE_S)
    if not connected:
        return meeting
    say("measuring the links, one after another")
    _measure(meeting)
    if job.rank == 0:
        ring = ring_links(job.world_size)
        meeting.hear("turn", [len(ring)], bool, len(ring) * _link_s(job.world_size, timeout_s))
        results = meeting.hear("result", survey.present, list[Direction], LATE_S, say)
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
        with short_slices():  # as the links of a training job have them
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
            meeting.hear("turn", [turn], bool, turn * longest_s)
        peer = link[0] if rank == link[1] else link[1]
        try:
            with short_slices():
                round_trip_us, gbps = bounded(partial(measure_link, peer, rank == link[0], seconds), longest_s)
            directions.append(Direction(source=rank, destination=peer, round_trip_us=round_trip_us, gbps=gbps))
        except Exception as error:
            directions.append(Direction(source=rank, destination=peer, problem=_reason(error)))
        meeting.tell("turn", True, turn + 1)  # by the first of the two ranks
    meeting.tell("result", directions)


def _reason(error: BaseException) -> str:
    """The message of a backend without the source location."""
    return re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip()) or type(error).__name__
