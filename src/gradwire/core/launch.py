"""The tasks of a launch order: bucket, piece and phase of each, in the order of each lane."""

from collections import defaultdict
from collections.abc import Collection, Sequence
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


def lanes_of_pieces(
    order: Sequence[PieceTask], lanes: int, offloaded: Collection[int] = (), offload_lanes: int = 0
) -> dict[tuple[int, int], int]:
    """The lane of each piece, dealt out in turn. Pieces of `offloaded` buckets have lanes of their own, so that no codec on a CPU
    keeps another bucket from being launched.

    >>> lanes_of_pieces([(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)], lanes=2, offloaded=[1], offload_lanes=1)
    {(0, 0): 0, (1, 0): 2, (2, 0): 1, (3, 0): 0}
    """
    found: dict[tuple[int, int], int] = {}
    dealt = [0, 0]
    for bucket, piece, _ in order:
        if (bucket, piece) not in found:
            apart = offload_lanes > 0 and bucket in offloaded
            found[bucket, piece] = lanes + dealt[1] % offload_lanes if apart else dealt[0] % lanes
            dealt[apart] += 1
    return found


def tasks_by_lane(
    order: Sequence[PieceTask], lanes: int, offloaded: Collection[int] = (), offload_lanes: int = 0
) -> list[list[PieceTask]]:
    """The tasks of each lane. A piece stays on its lane, as `lanes_of_pieces` assigns it.

    >>> tasks_by_lane([(0, 0, 0), (0, 1, 0), (0, 0, 1)], lanes=2)
    [[(0, 0, 0), (0, 0, 1)], [(0, 1, 0)]]
    """
    lists: list[list[PieceTask]] = [[] for _ in range(lanes + offload_lanes)]
    lane_of = lanes_of_pieces(order, lanes, offloaded, offload_lanes)
    for task in order:
        lists[lane_of[task[:2]]].append(task)
    return lists


def codes_on_cpu(option: Sequence[str]) -> bool:
    """Whether an option has a codec on a CPU. A bucket on a GPU is then offloaded."""
    return any(task in ("comp:cpu", "decomp:cpu") for task in option)
