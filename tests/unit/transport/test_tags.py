"""Tags of messages: no two handles of one set of lanes have the same, and a step has enough of them."""

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire.transport import link
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.shared_lanes import LaneSet


class User:
    """A handle, as its lanes see it."""

    def __init__(self, lanes: "LaneSet[User]") -> None:
        self.first_tag = lanes.add(self)
        self.end_left: Callable[[], Callable[[], None] | None] = lambda: None


def test_large_steps_of_many_handles_have_tags_of_their_own() -> None:
    lanes: LaneSet[User] = LaneSet("lanes")
    users = [User(lanes) for _ in range(200)]
    most = 2 * (256 - 1) * 2048  # a ring of 256 ranks, and 16 GiB in chunks of 8 MiB
    assert all(lanes.sender(user.first_tag + most - 1) is user for user in users)
    assert max(user.first_tag for user in users) + most <= link._CHECK_TAGS


def too_many_chunks(group: InProcessGroup) -> str:
    plan = gw.Uniform(gw.QSGD(bits=4), scheme="ring", chunk_bytes=400)
    with pytest.raises(gw.PlanError) as caught:
        gw.Exchange({"weight": torch.zeros(1000)}, plan=plan, process_group=group)
    return str(caught.value)


def test_a_plan_with_more_messages_than_tags_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.exchange.exchange.TAGS", 19)
    for words in run_ranks(2, too_many_chunks):
        assert "take 20 tags of messages, and a step has 19" in words
