"""Islands of which a rank dies: errors that name it."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_quorums import Answers, answer
from worlds import World

import gradwire as gw
from gradwire.exchange import TensorMeta
from gradwire.integrations.elastic_islands import IslandLighthouse
from gradwire.integrations.island_calls import LostRankError
from gradwire.integrations.island_state import IslandState
from gradwire.integrations.islands import share_inside
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.members import Members


def without_rank_1(call: Callable[[Any], Any]) -> tuple[str, tuple[int, ...]]:
    group: Any = dist.group.WORLD
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(gw.CommunicationError) as error:
        call(group)
    return str(error.value), error.value.ranks


def shares(group: Any) -> None:
    share_inside(group, {"weight": torch.zeros(3)}, {"weight": 1})


def loads(group: Any) -> None:
    outer: Any = SimpleNamespace(weights={"weight": torch.zeros(3)})
    IslandState(outer, None, group, group).load({})


def of_lighthouse(group: Any) -> IslandLighthouse:
    lighthouse = IslandLighthouse.__new__(IslandLighthouse)
    lighthouse._island, lighthouse.place = group, 1
    return lighthouse


def agrees(group: Any) -> None:
    of_lighthouse(group).all_agree(True)


def asks(group: Any) -> None:
    of_lighthouse(group)._of_first(b"")


@pytest.mark.parametrize("call", [shares, loads, agrees, asks])
def test_a_rank_that_died_is_named_on_its_island(call: Callable[[Any], Any]) -> None:
    with World(2, 30.0) as world:
        world.start(without_rank_1, call)
        survivor, _ = world.collect(60, needed={0})
    assert survivor.kind == "returned", survivor.value
    said, ranks = survivor.value
    assert said.startswith("rank 0: one of the ranks [1] died or stalled") and ranks == (1,)


class BrokenIsland(Answers):
    """The lighthouse of an island of which a rank died."""

    def all_do(self, action: Callable[[], None]) -> None:
        raise LostRankError("rank 1 died")


def test_an_island_that_lost_a_rank_asks_for_no_other_quorum() -> None:
    """Each question would fail, for ever: all of its ranks would have to answer."""
    lighthouse: Any = BrokenIsland(answer())
    members = Members({"weight": TensorMeta((2,))}, gw.Identity(), MemberState(dict, print), lighthouse)  # type: ignore[arg-type]
    with pytest.raises(LostRankError):
        members.meet()
