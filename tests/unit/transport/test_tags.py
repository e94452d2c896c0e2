"""The users of one set of lanes: tags of messages, of which no two have the same, and steps that one of them left."""

import threading
from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire.transport import link
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.shared_lanes import LaneSet


class User:
    """A handle, as its lanes see it."""

    def __init__(self, lanes: "LaneSet[User]", device: str = "cpu") -> None:
        self.first_tag, self.device = lanes.add(self), torch.device(device)
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_backward_on_a_gpu_finds_the_step_that_another_handle_left(device: str) -> None:
    """Its hooks run in a thread of autograd's own."""
    lanes: LaneSet[User] = LaneSet("lanes")
    first, second = User(lanes, device), User(lanes, device)
    lanes.begins(first)
    assert lanes.before(first) is None and lanes.before(second) is first
    found = {}
    output = torch.ones(1, requires_grad=True) * 2
    output.register_hook(lambda gradient: found.update(inside=lanes.before(second), own=lanes.before(first)))

    def of_another_thread() -> None:
        found["outside"] = lanes.before(second)
        output.sum().backward()

    worker = threading.Thread(target=of_another_thread)
    worker.start()
    worker.join()
    assert found == {"outside": None, "inside": first if device == "cuda" else None, "own": None}
