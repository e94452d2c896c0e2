"""Which quorums a member takes for the one that it met already, without a lighthouse."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import gradwire as gw
from gradwire.exchange import TensorMeta
from gradwire.integrations import members as module
from gradwire.integrations import quorum
from gradwire.integrations.handover import MemberCard
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
        self.asked: list[int] = []
        """The steps of the questions."""

    def ask(self, step: int, failures: int) -> Any:
        self.asked.append(step)
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


class Meets(Answers):
    """A lighthouse whose members meet, as far as this one sees."""

    def all_do(self, action: Callable[[], None]) -> None:
        action()

    def group_of(self, quorum: Any) -> Any:
        return SimpleNamespace(rank=0, world_size=2)


def exchanges(monkeypatch: pytest.MonkeyPatch, *others: MemberCard) -> None:
    """Let the other member send these cards, one in each meeting."""
    cards = list(others)

    class Card:
        rank, world_size = 0, 2

        def gather(self, own: bytes) -> list[bytes]:
            return [own, msgspec.json.encode(cards.pop(0))]

    def exchange(tensors: object, plan: object, group: object) -> Any:
        control = SimpleNamespace(submit=lambda act: SimpleNamespace(result=lambda: act(Card())))
        residuals = SimpleNamespace(state=dict)
        values = {"group": group, "residuals": residuals, "lanes": SimpleNamespace(control=control)}
        return SimpleNamespace(abort=lambda: None, go_on=lambda *_: None, **values)

    monkeypatch.setattr(module, "Exchange", exchange)


@pytest.mark.parametrize(("own", "other", "asked"), [(0, 1, [16, 15]), (1, 0, [16, 16]), (1, 1, [16])])
def test_who_lost_fewer_iterations_of_a_step_gets_the_state_of_another(
    monkeypatch: pytest.MonkeyPatch, own: int, other: int, asked: list[int]
) -> None:
    """In an iteration that does not count a scheduler and a GradScaler step, so states of one step differ."""
    exchanges(monkeypatch, MemberCard(False, {}, at=(16, other)), MemberCard(False, {}, at=(16, own)))
    again = {"quorum_id": 6, "max_step": 16, "recover_dst_replica_ranks": []}
    lighthouse: Any = Meets(answer(**again | {"quorum_id": 5}), answer(**again))
    members = Members({"weight": TensorMeta((2,))}, gw.Identity(), MemberState(dict, print), lighthouse)
    members.step, members.lost, members._took_part = 16, own, True
    members.meet()
    assert lighthouse.asked == asked and members.lost == own
    members.commit()
    assert members.lost == 0


def test_members_that_lag_keep_their_step_where_those_ahead_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They asked as members of the step before, to get a state that nobody has any more."""
    same = MemberCard(False, {}, at=(16, 0))
    exchanges(monkeypatch, same, same)
    left = {"recover_dst_replica_ranks": []}
    lighthouse: Any = Meets(answer(**left, max_step=15), answer(**left, max_step=16, quorum_id=6))
    members = Members({"weight": TensorMeta((2,))}, gw.Identity(), MemberState(dict, print), lighthouse)
    members.step, members._took_part, members._lags = 16, True, True
    members.meet()
    assert (lighthouse.asked, members.step) == ([15, 16], 16)
