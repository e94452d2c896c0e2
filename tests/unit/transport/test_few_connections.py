"""Connections that a thread makes when a lane needs them, where it fails: who waits for one learns why, at once."""

import errno
import os
import resource
import selectors
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from gradwire.transport import addresses, rendezvous
from gradwire.transport.keys import JobKey
from gradwire.transport.rendezvous import Rendezvous
from gradwire.transport.wire import LinkError


def fails(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


def reached_by_rank_1(before: Callable[[], None]) -> LinkError:
    """What rank 1 learns as it connects with rank 0, where `before` comes before that."""
    store, ends = HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: Rendezvous("test", JobKey(bytes(32)), rank, 2, store, "here", ends), range(2)))
    try:
        for each in made:
            each.start()
        before()
        began_s = time.monotonic()
        with pytest.raises(LinkError) as caught:
            made[1].reach("lane", [0])
        assert time.monotonic() - began_s < 15, "it waited its whole patience"  # of 24 s
        return caught.value
    finally:
        for each in made:
            each.close()


@pytest.fixture(autouse=True)
def many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are too many to connect all with all."""
    monkeypatch.setattr(rendezvous, "AT_ONCE", 1)


def test_a_call_without_a_descriptor_fails_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.EMFILE, "Too many open files")
    error = reached_by_rank_1(lambda: monkeypatch.setattr(rendezvous, "_family", fails(full)))
    assert error.peer == 0 and "Too many open files" in str(error) and "ulimit -n" in str(error)


def test_nobody_waits_for_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    error = reached_by_rank_1(lambda: monkeypatch.setattr(Rendezvous, "_begin_call", fails(RuntimeError("out of luck"))))
    assert "out of luck" in str(error)


def test_who_does_not_connect_in_time_is_named_with_the_wait_and_the_cure() -> None:
    store, ends = HashStore(), timedelta(seconds=0.5)
    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: Rendezvous("test", JobKey(bytes(32)), rank, 2, store, "here", ends), range(2)))
    try:
        with pytest.raises(LinkError, match=r"no connection with rank 1 within 0\.2 s: .* a longer timeout=") as error:
            made[0].connect([rendezvous.CONTROL])
        assert error.value.peer == 1
    finally:
        for each in made:
            each.close()


def test_the_soft_limit_of_descriptors_is_raised_where_it_is_too_low() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 60, before[1]))
    try:
        assert addresses.why_too_few(5) == "" and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == opened + 60
        assert addresses.why_too_few(200, wanted=40) == ""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and opened + 240 < soft <= hard
        assert "Raise it to at least" in addresses.why_too_few(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("ranks", "nodes", "connections"),
    [(2, 2, 1), (64, 64, 20), (256, 256, 30), (1024, 1024, 62), (1021, 1021, 62), (1024, 128, 134), (1024, 1, 62)],
)
def test_the_usual_connections_of_a_lane_are_those_of_the_usual_plans(
    monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int, connections: int
) -> None:
    monkeypatch.setattr(rendezvous, "AT_ONCE", 16)
    meeting = Rendezvous("test", JobKey(bytes(32)), 0, 1, HashStore(), "here", timedelta(seconds=60))
    meeting._world_size, meeting.nodes = ranks, [str(rank * nodes // ranks) for rank in range(ranks)]
    assert meeting._usual("lane 0") == connections
    meeting.close()


def test_descriptors_are_counted_once_the_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between nodes a lane connects with all of them, which no rank knows before it has read the cards."""
    known: list[int] = []
    monkeypatch.setattr(Rendezvous, "why_too_few", lambda self, meshes: known.append(len(self.nodes)) or "")
    store, ends = HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: Rendezvous("test", JobKey(bytes(32)), rank, 2, store, str(rank), ends), range(2)))
    for each in made:
        each.close()
    assert sorted(known) == [0, 0, 2, 2]


def two_ranks(timeout_s: float = 60.0) -> list[Rendezvous]:
    """Both ends of a meeting whose threads answer and call."""
    store, ends = HashStore(), timedelta(seconds=timeout_s)
    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: Rendezvous("test", JobKey(bytes(32)), rank, 2, store, "here", ends), range(2)))
    for each in made:
        each.start()
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Who called whom."""
    seen: list[tuple[int, int]] = []
    begin = Rendezvous._begin_call

    def begin_call(meeting: Rendezvous, handshakes: Any, peer: int, name: str) -> None:
        seen.append((meeting._rank, peer))
        begin(meeting, handshakes, peer, name)

    monkeypatch.setattr(Rendezvous, "_begin_call", begin_call)
    return seen


def test_a_lower_rank_asks_for_no_call_that_comes_by_itself(calls: list[tuple[int, int]]) -> None:
    made = two_ranks()
    with ThreadPoolExecutor(1) as lane:
        lower = lane.submit(made[0].reach, "lane", [1])
        time.sleep(0.1)
        ends = [*made[1].reach("lane", [0]).values(), *lower.result().values()]
    assert len(ends) == 2 and calls == [(1, 0)]
    for end in (*ends, *made):
        end.close()


@pytest.mark.parametrize("timeout_s", [60.0, 2.0])
def test_a_lower_rank_asks_for_a_call_that_does_not_come(
    calls: list[tuple[int, int]], timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the group's timeout is shorter than the grace."""
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.2 if timeout_s > 10 else 100.0)
    made = two_ranks(timeout_s)
    (end,) = made[0].reach("lane", [1]).values()
    assert calls == [(0, 1), (1, 0)]
    for each in (end, *made):
        each.close()


class AtOnce:
    """A socket whose connection is there as soon as it is asked for, as over loopback, though the system says that it takes
    longer."""

    def __init__(self) -> None:
        self.answers, self.sent = [errno.EINPROGRESS, 0], b""

    def connect_ex(self, place: tuple[str, int]) -> int:
        return self.answers.pop(0)

    def send(self, what: bytes) -> int:
        self.sent += what
        return len(what)

    def recv(self, count: int) -> bytes:
        raise BlockingIOError


def test_a_call_that_is_there_at_once_waits_for_the_answer_alone() -> None:
    made, connection = two_ranks(), AtOnce()
    steps = made[1]._call(connection, 0, "lane")  # type: ignore[arg-type]
    assert next(steps) == selectors.EVENT_READ and connection.sent
    steps.close()
    for each in made:
        each.close()
