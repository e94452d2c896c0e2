"""Finds the rank that was behind when a step failed, from the flight records of ranks. Pure: no communication."""

from collections import Counter
from collections.abc import Sequence

from gradwire.doctor.differences import rank_list
from gradwire.errors import FormatError
from gradwire.transport import FlightRecord


def behind(records: Sequence[FlightRecord]) -> list[str]:
    """Return lines to print: the rank that was behind and its open tasks, then the place of each rank.

    Raises FormatError for records of more than one failure.
    """
    _check_one_failure(records)
    by_rank = {record.rank: record for record in records}
    ranks = sorted({rank for record in records for rank in record.ranks})
    silent = [rank for rank in ranks if rank not in by_rank]
    lines = []
    if silent:
        names = ", ".join(map(str, silent))
        lines.append(f"rank {names} wrote no record: killed, stopped, or its file is not among these. Look at its log first.")
    else:
        last = min(ranks, key=lambda rank: _progress(by_rank[rank]))
        same = len({_progress(record) for record in records}) == 1
        lines.append("no rank was behind the others." if same else f"rank {last} was behind: {_place(by_rank[last])}.")
    lines += [f"rank {rank}: {_place(by_rank[rank])}. Its error: {by_rank[rank].error}" for rank in ranks if rank in by_rank]
    return lines


def _check_one_failure(records: Sequence[FlightRecord]) -> None:
    counts = Counter(record.rank for record in records)
    twice = next((rank for rank, count in sorted(counts.items()) if count > 1), None)
    groups = list(dict.fromkeys(tuple(record.ranks) for record in records))
    if twice is not None:
        what = f"rank {twice} has {counts[twice]} records"
    elif len(groups) > 1:
        what = f"the records are of two groups, {rank_list(groups[0])} and {rank_list(groups[1])}"
    else:
        return
    raise FormatError(
        f"{what}, so they are of more than one failure, and would name a wrong rank. Give the files of one failure: their names "
        "agree between `gradwire-flight-` and `-rank`."
    )


def _progress(record: FlightRecord) -> tuple[int, int]:
    """Return the last step, and the number of tasks that ended in it."""
    if not record.steps:
        return -1, 0
    last = record.steps[-1]
    return last.step, sum(task.ended_s > 0 for task in last.tasks)


def _place(record: FlightRecord) -> str:
    if not record.steps:
        return "no step had begun"
    last = record.steps[-1]
    open_tasks = [f"{task.what} for {record.written_s - task.began_s:.1f} s" for task in last.tasks if not task.ended_s]
    ended = sum(task.ended_s > 0 for task in last.tasks)
    where = " and ".join(open_tasks) if open_tasks else "in no task: its script computed, or it had not begun the next step"
    return f"step {last.step}, {ended} tasks done, {where}"
