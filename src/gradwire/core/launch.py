"""The tasks of a launch order: bucket, piece and phase of each, in the order of each lane."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

PieceTask = tuple[int, int, int]
"""Bucket, piece (a chunk of the bucket) and phase (a link task of its option), each by number."""


def launch_tasks(
    launch: Sequence[tuple[int, str]], pieces: Sequence[int], skew: bool, gate: int | None = None
) -> list[PieceTask]:
    """All link tasks of a step, piece by piece, in the order in which ranks run them.

    launch: the plan's launch order. pieces: the number of pieces of each bucket. gate: a position in the launch order.
    Consecutive launches of one bucket on the same side of the gate run piece by piece. With skew, a later phase of a piece comes
    after the first phase of the bucket's next piece. Then one piece is encoded while the other is on the wire.

    >>> launch_tasks([(0, "alltoall"), (0, "allgather")], pieces=[2], skew=False)
    [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    >>> launch_tasks([(0, "alltoall"), (0, "allgather")], pieces=[2], skew=True)
    [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    >>> launch_tasks([(0, "alltoall"), (0, "allgather")], pieces=[2], skew=False, gate=1)
    [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    """
    done: dict[int, int] = defaultdict(int)
    order: list[PieceTask] = []
    for part in (launch[:gate], launch[gate:] if gate is not None else ()):
        for bucket, run in groupby(part, key=lambda entry: entry[0]):
            phases = range(done[bucket], done[bucket] + len(list(run)))
            done[bucket] = phases.stop
            order += [(bucket, piece, phase) for piece in range(pieces[bucket]) for phase in phases]
    if skew:
        for at in range(len(order) - 1):
            (bucket, _, phase), (following, _, following_phase) = order[at], order[at + 1]
            if phase > 0 and following_phase == 0 and bucket == following:
                order[at], order[at + 1] = order[at + 1], order[at]
    return order


def tasks_by_lane(order: Sequence[PieceTask], lanes: int) -> list[list[PieceTask]]:
    """The tasks of each lane: pieces go round the lanes, and a piece stays on its lane.

    >>> tasks_by_lane([(0, 0, 0), (0, 1, 0), (0, 0, 1)], lanes=2)
    [[(0, 0, 0), (0, 0, 1)], [(0, 1, 0)]]
    """
    lists: list[list[PieceTask]] = [[] for _ in range(lanes)]
    lane_of: dict[tuple[int, int], int] = {}
    for bucket, piece, phase in order:
        lists[lane_of.setdefault((bucket, piece), len(lane_of) % lanes)].append((bucket, piece, phase))
    return lists
