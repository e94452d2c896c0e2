"""Steps whose operations are queued on a device: no checkpoint and no later step builds on sums that never arrived."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_double import Device, run_staged_ranks
from test_staging import kernels_in_torch
from worlds import Given

import gradwire as gw
from gradwire.exchange import layout
from gradwire.transport import COMPLETE, Grid, Group, Lanes, Link, LinkError, QueuedStep
from gradwire.transport import queued as queued_steps
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.messages import Messages
from gradwire.transport.queued import UNKNOWN_BUCKET
from gradwire.transport.streams import DeviceStreams

TIMEOUT_S = 6.0


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[DeviceStreams]]:
    """Streams on which nothing completes."""
    streams: set[DeviceStreams] = set()
    monkeypatch.setattr(DeviceStreams, "is_done", lambda self, mark: self not in streams)
    monkeypatch.setattr(layout, "launches", lambda device: True)
    yield streams


def on_double(function: Any, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> list[Any]:
    """What two ranks on the double return."""
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        return run_staged_ranks(device, 2, function, TIMEOUT_S, *arguments)


class Training:
    """A model on one rank of the double, whose sums stop to arrive on rank 1."""

    def __init__(self, group: Any, stuck: set[DeviceStreams], **options: Any) -> None:
        self.group, self.stuck, self.model = group, stuck, Given([300, 20], seed=0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-5)
        self.handle = gw.parallelize(self.model, optimizer, plan=gw.Identity(), process_group=group, **options)
        self.lanes = self.handle.session.lanes
        self.streams = [lane.link.streams for lane in self.lanes.data]

    def step(self) -> None:
        self.model(self.model.random_gradients(self.group.rank)).backward()

    def step_without_end(self) -> None:
        """A step that counts, of which rank 1's operations never complete."""
        if self.group.rank == 1:
            self.stuck.update(self.streams)
        self.step()


def next_step(group: Any, stuck: set[DeviceStreams]) -> str:
    training = Training(group, stuck)
    training.step()
    training.step_without_end()
    try:
        training.step()
    except gw.CommunicationError as error:
        # on a slow machine rank 0 is told while it waits for reports, and its own wait is for no bucket
        assert error.ranks == (1,) and error.bucket in ((0,) if group.rank == 1 else (0, None))
        return str(error)
    finally:
        training.handle.detach()
    return ""


def test_all_ranks_hear_in_the_next_step_that_sums_never_arrived(
    stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in on_double(next_step, monkeypatch, stuck):
        assert "step 1: sums that were queued on the device never arrived, or not in time, on rank 1, from bucket 0 on" in words


def saves(group: Any, stuck: set[DeviceStreams], save: Callable[[Training], Any]) -> bool:
    """Whether this rank could save."""
    training = Training(group, stuck)
    training.step()
    training.step_without_end()
    try:
        save(training)
    except gw.CommunicationError:
        return False
    return True


@pytest.mark.parametrize("save", [lambda each: each.handle.state_dict(), lambda each: each.model.state_dict()])
def test_no_checkpoint_holds_a_step_whose_sums_never_arrived(
    save: Callable[[Training], Any], stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_double(saves, monkeypatch, stuck, save) == [True, False]


def saves_after_a_failure(group: Any, stuck: set[DeviceStreams], mendable: bool) -> tuple[bool, bool]:
    """Whether the weights that the last good step left are saved, and whether the handle's state is."""
    training = Training(group, stuck)
    training.step()
    training.lanes.fail(gw.CommunicationError("a rank is gone"), mendable)
    weights = training.model.state_dict()
    try:
        training.handle.state_dict()
    except gw.GradwireError:
        return bool(weights), False
    return bool(weights), True


@pytest.mark.parametrize("mendable", [False, True], ids=["failed", "void"])
def test_weights_can_be_saved_after_a_failure_of_a_later_step(
    mendable: bool, stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_double(saves_after_a_failure, monkeypatch, stuck, mendable) == [(True, False)] * 2


def saves_optimizer(group: Any, stuck: set[DeviceStreams]) -> tuple[bool, bool]:
    """Whether this rank could save the optimizer's state, with shards, after a step that ended and after one that did not."""
    model = Given([300, 20], seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.9)
    plan = gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=group)
    model(model.random_gradients(group.rank)).backward()
    optimizer.step()
    could = bool(handle.optimizer_state_dict()["state"])
    lanes = handle.session.lanes
    lanes._incomplete = (1, 0) if group.rank == 1 else None  # as if sums of the next step had not arrived there
    try:
        handle.optimizer_state_dict()
    except gw.CommunicationError:
        return could, False
    return could, True


def test_no_optimizer_state_holds_a_step_whose_sums_never_arrived(
    stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_double(saves_optimizer, monkeypatch, stuck) == [(True, False)] * 2


def saves_exchange(group: Any, stuck: set[DeviceStreams]) -> bool:
    exchange = gw.Exchange({"t": torch.zeros(300)}, plan=gw.Identity(), process_group=group)
    if group.rank == 1:
        stuck.update(lane.link.streams for lane in exchange.lanes.data)
    exchange.average_()
    try:
        exchange.state_dict()
    except gw.CommunicationError:
        return False
    return True


def test_no_state_of_an_exchange_holds_sums_that_never_arrived(
    stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_double(saves_exchange, monkeypatch, stuck) == [True, False]


def steps_that_end_late(group: Any, stuck: set[DeviceStreams], digests: list[bool]) -> int:
    training = Training(group, stuck, drift_check_steps=1)
    drift = training.handle.session.reducer.control._drift
    digest = drift.digest
    training.step()
    training.step_without_end()
    threading.Timer(0.3, stuck.clear).start()
    drift.digest = lambda weights: digests.append(not stuck.isdisjoint(training.streams)) or digest(weights)  # type: ignore[func-returns-value]
    training.step()
    training.handle.detach()
    return training.handle.session.step


def test_weights_are_compared_when_the_sums_of_the_step_before_have_arrived(
    stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    assert on_double(steps_that_end_late, monkeypatch, stuck, found) == [3, 3]
    assert len(found) == 2 and not any(found)


def detaches_at_once(group: Any, stuck: set[DeviceStreams]) -> list[bool]:
    """Whether something was under way when this rank closed each lane for gradients."""
    training = Training(group, stuck)
    training.step()
    training.step_without_end()
    threading.Timer(0.3, stuck.clear).start()
    under_way: list[bool] = []
    for lane in training.lanes.data:
        close = lane.link.close
        lane.link.close = lambda close=close: (under_way.append(bool(stuck)), close())  # type: ignore[method-assign]
    training.handle.detach()
    return under_way


def test_lanes_close_when_the_sums_of_the_last_step_have_arrived(
    stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, of_rank_1 = on_double(detaches_at_once, monkeypatch, stuck)
    assert of_rank_1 and not any(of_rank_1)


def trains_once(group: Any, stuck: set[DeviceStreams]) -> str:
    """A step. The name of the control lane's thread."""
    training = Training(group, stuck)
    training.step()
    training.handle.detach()
    return training.lanes.control._thread.name


def test_the_thread_that_asks_for_marks_is_on_their_device(stuck: set[DeviceStreams], monkeypatch: pytest.MonkeyPatch) -> None:
    entered, enter = list[str](), DeviceStreams.enter_thread

    def enter_thread(own: DeviceStreams) -> None:
        entered.append(threading.current_thread().name)
        enter(own)

    monkeypatch.setattr(DeviceStreams, "enter_thread", enter_thread)
    controls = on_double(trains_once, monkeypatch, stuck)
    assert [entered.count(name) for name in controls] == [2, 2], "a rank has one of its own, both have one name"


# ---- one queued step


class QueuedLink:
    """A link on whose stream the first `complete` marks have come."""

    def __init__(self, complete: int, failed: bool = False) -> None:
        self.streams: Any = SimpleNamespace(is_done=lambda mark: mark < complete)
        self.failed = failed

    def has_failed(self) -> bool:
        return self.failed


def queued(link: QueuedLink) -> QueuedStep:
    """Three buckets with a mark each, launched from the last one to the first."""
    buckets: list[Future[Any]] = [Future() for _ in range(3)]
    for bucket, future in enumerate(buckets):
        future.set_result([2 - bucket])
    return QueuedStep(7, [(link, 2)], buckets, [2, 1, 0])  # type: ignore[list-item]


@pytest.mark.parametrize(("complete", "first"), [(0, 2), (1, 1), (2, 0), (3, COMPLETE)])
def test_the_first_bucket_in_launch_order_that_is_not_complete_is_named(complete: int, first: int) -> None:
    assert queued(QueuedLink(complete)).await_end(0.0, lambda: False) == first


def test_a_wait_ends_soon_after_a_rank_has_ended_or_the_device_reports_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_steps, "GRACE_S", 0.5)
    began = time.monotonic()
    assert queued(QueuedLink(1)).await_end(60.0, lambda: True) == 1
    ends_well = QueuedLink(3)
    ends_well.streams.is_done = lambda mark: time.monotonic() > began + 0.7
    assert queued(ends_well).await_end(60.0, lambda: True) == COMPLETE
    assert queued(QueuedLink(1, failed=True)).await_end(60.0, lambda: False) == 1
    broken = QueuedLink(3)

    def raises(mark: int) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    broken.streams.is_done = raises
    assert queued(broken).await_end(60.0, lambda: False) == 2
    assert time.monotonic() - began < 30


def test_operations_that_were_aborted_are_not_complete() -> None:
    assert queued(QueuedLink(3, failed=True)).await_end(60.0, lambda: False) == UNKNOWN_BUCKET


def test_messages_know_that_a_rank_has_closed_its_end() -> None:
    ours, theirs = socket.socketpair()
    messages = Messages({1: ours}, 0, 2, timedelta(seconds=5))
    theirs.send(b"unread")
    assert not messages.has_lost_a_rank()
    theirs.close()
    assert messages.has_lost_a_rank()
    messages.close()


# ---- NCCL


class FakeNccl:
    """Takes the place of NCCL's backend."""

    made: "list[FakeNccl]" = []  # noqa: RUF012
    refuses = False

    class Options:
        _timeout = timedelta(seconds=1)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.calls: list[str] = []
        self.errors, self.timeout = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), options._timeout
        self.connected: list[torch.device] = []
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.refuses:
            raise RuntimeError("Duplicate GPU detected")
        self.connected.append(device)

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> Any:
        return SimpleNamespace(name="SUCCESS")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def nccl_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(Group, "store", lambda self, name: None)
    monkeypatch.setattr(FakeNccl, "made", [])
    nobody: Any = None
    met: Any = SimpleNamespace(name="met", break_off=lambda: None)
    yield Group(nobody, 0, (0, 1), timedelta(seconds=60), Grid.even(1, 2, 0), meeting=met)


@pytest.mark.parametrize("before", [None, "3"])
def test_nccl_ends_no_process_and_gives_up_later_than_other_links(
    before: str | None, nccl_group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    nccl_group.connect("0", torch.device("cuda"), timedelta(seconds=50))
    (backend,) = FakeNccl.made
    assert backend.errors == "2" and os.environ.get(name) == before
    assert backend.timeout > 2 * timedelta(seconds=50)


def test_nccl_connects_at_once(nccl_group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_group.connect("0", torch.device("cuda"), timedelta(seconds=50))
    nccl_group.connect("0", torch.device("cuda", 0), timedelta(seconds=50))
    assert [backend.connected for backend in FakeNccl.made] == [[torch.device("cuda", 3)], [torch.device("cuda", 0)]]
    monkeypatch.setattr(FakeNccl, "refuses", True)
    with pytest.raises(LinkError, match="Duplicate GPU"):
        nccl_group.connect("1", torch.device("cuda"), timedelta(seconds=50))


def makes_lanes(group: InProcessGroup) -> None:
    for device in (None, torch.device("cpu"), torch.device("cuda", 1)):
        Lanes.of_handle(group, None, None, device).abort()


def test_ranks_meet_on_the_gpu_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    current, met_on, meet = threading.local(), list[Any](), InProcessGroup.meet

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.device = device
        yield
        del current.device

    def meets(own: Any, *arguments: Any) -> Any:
        met_on.append(getattr(current, "device", None))
        return meet(own, *arguments)

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(InProcessGroup, "meet", meets)
    run_ranks(1, makes_lanes)
    assert met_on == [None, None, torch.device("cuda", 1)]


def test_nccl_is_shut_down_when_what_was_queued_has_completed(nccl_group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    with Device().used(monkeypatch):
        link, done = Link(nccl_group, "0", torch.device("cuda", 0), timedelta(seconds=50)), threading.Event()
        monkeypatch.setattr(DeviceStreams, "is_done", lambda own, mark: done.is_set())
        (backend,) = FakeNccl.made
        threading.Timer(0.3, lambda: (backend.calls.append("completed"), done.set())).start()
        link.close()
        assert backend.calls == ["completed", "shutdown"]


def test_nccl_is_aborted_where_what_was_queued_cannot_complete(nccl_group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStreams, "is_done", lambda own, mark: False)
    with Device().used(monkeypatch):
        link = Link(nccl_group, "0", torch.device("cuda", 0), timedelta(seconds=50))
        threading.Timer(0.3, link.break_off).start()
        link.close()
        assert FakeNccl.made[0].calls == ["abort"]
