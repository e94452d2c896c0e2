"""Which ranks share a node, from what all of them say."""

import pytest

from gradwire.errors import PlanError
from gradwire.transport.grid import Grid, machine_name


def test_groups_of_both_links() -> None:
    for rank in range(6):
        grid = Grid.even(2, 3, rank)
        assert grid.group("intra") == ((0, 1, 2) if rank < 3 else (3, 4, 5))
        assert grid.group("inter") == (rank % 3, rank % 3 + 3)
        assert grid.group("all") == (0, 1, 2, 3, 4, 5)


def test_ranks_need_not_be_in_the_order_of_nodes() -> None:
    grid = Grid.of(["x", "y", "y", "x"], rank=3)
    assert grid.members == ((0, 3), (1, 2))
    assert (grid.group("intra"), grid.group("inter")) == ((0, 3), (3, 2))
    assert (grid.node_of(2), grid.place_of(2)) == (1, 1)


class NeverSearched(tuple[int, ...]):
    """The ranks of a node."""

    def __contains__(self, rank: object) -> bool:
        raise AssertionError("the ranks of each node were searched")

    def index(self, *rank: object) -> int:  # type: ignore[override]
        raise AssertionError("the ranks of a node were searched")


def test_nodes_and_places_of_many_ranks_are_found_without_a_search() -> None:
    grid = Grid(tuple(NeverSearched(range(first, first + 8)) for first in range(0, 1024, 8)), 0)
    assert [(grid.node_of(rank), grid.place_of(rank)) for rank in range(1024)] == [divmod(rank, 8) for rank in range(1024)]
    assert grid == Grid.even(128, 8, 0) and hash(grid) == hash(Grid.even(128, 8, 0))


def test_a_root_has_a_deputy_in_every_group() -> None:
    grid = Grid.even(3, 2, 0)
    # rank 3 stands at place 1 of node 1
    assert [grid.root_of(group, 3) for group in grid.groups("intra")] == [1, 3, 5]
    assert [grid.root_of(group, 3) for group in grid.groups("inter")] == [2, 3]
    assert grid.root_of(grid.group("all"), 3) == 3


def test_bytes_by_link() -> None:
    assert Grid.even(2, 2, 1).split([1, 0, 10, 100]) == (1, 110)
    assert Grid.even(1, 3, 1).split([1, 0, 10]) == (11, 0)


def test_uneven_nodes_are_refused_only_where_it_matters() -> None:
    grid = Grid.of(["a", "a", "a", "b"], rank=0)
    assert grid.ranks_per_node_if_even is None and Grid.even(2, 3, 0).ranks_per_node_if_even == 3
    assert grid.nodes == 2 and grid.group("all") == (0, 1, 2, 3) and grid.split([0, 1, 1, 5]) == (2, 5)
    with pytest.raises(PlanError, match=r"nodes have 1 and 3 ranks.*scheme='leaders'"):
        _ = grid.ranks_per_node


def test_roots_of_uneven_nodes_stand_at_a_place_that_all_have() -> None:
    grid = Grid.of(["a", "a", "a", "b", "b"], rank=0)
    assert grid.groups("inter") == ((0, 3), (1, 4), (2,))
    for root, leaders in ((0, [0, 3]), (1, [1, 4]), (2, [0, 3]), (3, [0, 3]), (4, [1, 4])):
        assert [grid.root_of(group, root) for group in grid.groups("intra")] == leaders


def test_a_node_is_named_by_torchrun_or_by_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    host = machine_name()
    monkeypatch.setenv("GROUP_RANK", "7")
    assert machine_name() == "torchrun 7" != host
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert machine_name() == host
