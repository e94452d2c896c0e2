"""Itineraries: ranks agree on what passes between them, and a rank follows no more than its own messages."""

from collections.abc import Sequence

import pytest

from gradwire.collectives import itinerary as itineraries
from gradwire.collectives.itinerary import itinerary
from gradwire.plan.options import tree
from gradwire.transport import Grid

HIERARCHICAL = ("reducescatter:intra", "comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")


def cut(start: int, end: int, parts: int) -> Sequence[int]:
    """Cuts at every third element."""
    units = (end - start) // 3
    return [start + 3 * (units * part // parts) for part in range(parts)] + [end]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize("numel", [1, 7, 123])
def test_what_a_rank_sends_is_what_the_other_one_receives(nodes: int, ranks_per_node: int, numel: int) -> None:
    ranks = range(nodes * ranks_per_node)
    for number, option in enumerate(tree(("gpu",))):
        root = number % len(ranks)
        each = [itinerary(option.tasks, Grid.even(nodes, ranks_per_node, rank), root, numel, cut) for rank in ranks]
        for legs in zip(*each, strict=True):
            for moves in zip(*(leg.moves for leg in legs), strict=True):
                sent = {(rank, to): items for rank in ranks for to, items in moves[rank].sent.items()}
                received = {(source, rank): items for rank in ranks for source, items in moves[rank].received.items()}
                assert sent == received, option.tasks
        for legs in each:
            made = {parcel for leg in legs if leg.encode is not None for parcel in leg.encode.parcels}
            kept = {parcel for leg in legs if leg.encode is not None for parcel in leg.encode.kept}
            moves = [move for leg in legs for move in leg.moves]
            assert kept <= made and all(
                parcel not in items for move in moves for items in sent_to_others(move, legs, each) for parcel in kept
            )


def sent_to_others(move: itineraries.ParcelMove, legs: object, each: list) -> list:
    """The items that a rank sends to other ranks."""
    own = next(rank for rank, those in enumerate(each) if those is legs)
    return [items for target, items in move.sent.items() if target != own]


def test_many_pieces_cost_what_the_own_messages_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, ranks_per_node, pieces, cuts = 128, 8, 5, [0]
    courses: list[object] = []
    made = itineraries._Course.__init__
    monkeypatch.setattr(
        itineraries._Course, "__init__", lambda self, *arguments: (courses.append(self), made(self, *arguments))[1]
    )

    def counted(start: int, end: int, parts: int) -> Sequence[int]:
        cuts[0] += 1
        return cut(start, end, parts)

    tasks = (*HIERARCHICAL, "allgather:intra")
    for piece in range(pieces):
        legs = itinerary(tasks, Grid.even(nodes, ranks_per_node, 77), piece, 10**6 + piece, counted)
        assert sum(len(items) for leg in legs for move in leg.moves for items in move.sent.values()) <= 3 * (
            nodes + ranks_per_node
        )
    assert len(courses) <= 1 and cuts[0] <= 4 * pieces
