"""Which quorums a member takes for the one that it met already, without a lighthouse."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import gradwire as gw
from gradwire.exchange import TensorMeta
from gradwire.integrations import quorum
from gradwire.integrations.meetings import quorum_key
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.members import Members


def answer(**values: Any) -> Any:
    """An answer of the lighthouse to one of two members."""
    usual = {"quorum_id": 5, "max_step": 0, "heal": False, "max_world_size": 2, "replica_ids": ["a", "b"]}
    return SimpleNamespace(**(usual | {"store_address": "127.0.0.1:1", "replica_rank": 0, "replica_world_size": 2} | values))


class Met(Exception):
    """The members meet anew."""


class Answers:
    """A lighthouse that gives these answers, one after another."""

    timeout = timedelta(seconds=5)

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def ask(self, step: int, failures: int) -> Any:
        return self._answers.pop(0)

    def all_do(self, action: Callable[[], None]) -> None:
        raise Met

    def end_watch(self) -> None: ...


class Stays:
    """The exchange of the first quorum."""

    group = SimpleNamespace(rank=0, world_size=2)

    def abort(self) -> None:
        raise AssertionError("the members part")


def members_of(*answers: Any) -> tuple[Members, Any]:
    """Members that met in the first of these quorums, and their exchange."""
    members = Members({"weight": TensorMeta((2,))}, gw.Identity(), MemberState(dict, print), Answers(*answers))  # type: ignore
    with pytest.raises(Met):
        members.meet()
    members._quorum = quorum_key(answers[0])
    exchange: Any = Stays()
    members.exchange = exchange
    return members, exchange


def test_a_first_step_that_a_grad_scaler_skips_parts_nobody() -> None:
    """Before the first step that counts, torchft lets all members but one load a state."""
    members, exchange = members_of(answer(heal=True), answer(heal=True))
    assert members.meet() is exchange


def test_a_step_that_does_not_count_leaves_rank_and_number() -> None:
    """Scripts choose by them who saves, and divide their data."""
    members, _ = members_of(answer())
    members.rank, members.world_size = 2, 3
    left: Any = SimpleNamespace(abort=lambda: None, residuals=SimpleNamespace(state=dict), group=SimpleNamespace(world_size=3))
    members.exchange = left
    members.give_up()
    assert members.exchange is None and (members.rank, members.world_size) == (2, 3)


@pytest.mark.parametrize("change", [{"quorum_id": 6}, {"replica_ids": ["a", "c"]}])
def test_other_members_meet_anew_also_under_a_number_of_before(change: dict[str, Any]) -> None:
    """A lighthouse that is started again counts from the beginning."""
    members, _ = members_of(answer(), answer(**change))
    with pytest.raises(Met):
        members.meet()


@pytest.mark.parametrize("change", [{"max_step": 7}, {"replica_ids": ["a", "c"]}, {}])
def test_a_number_that_is_used_again_is_no_key_of_before(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    keys: list[str] = []
    monkeypatch.setattr(quorum, "reach", lambda *_: None)
    monkeypatch.setattr(quorum, "PrefixStore", lambda key, store: keys.append(key))
    monkeypatch.setattr(quorum.Group, "of_store", lambda *_: None)
    member = quorum.Lighthouse("127.0.0.1:1", 2, timedelta(seconds=5), 5.0)
    for each in (answer(), answer(**change)):
        member.group_of(each)
    assert (keys[0] == keys[1]) == (not change)
    member.leave()
