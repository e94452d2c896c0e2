"""Who may connect: ranks, whatever else opens connections meanwhile, and nobody else."""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from strangers import SAYINGS, Strangers, listening_ports
from worlds import Given, World, Worlds

import gradwire as gw
from gradwire.transport import rendezvous
from gradwire.transport.heartbeats import Heartbeats
from gradwire.transport.rendezvous import Rendezvous


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


def connected(may_leave: int = 0) -> tuple[bool, bool, int]:
    """Whether all lanes of a new handle have wires, whether there are heartbeats from all ranks, and the descriptors that are
    left after it ended."""
    before = len(os.listdir("/proc/self/fd"))
    model = Given([300, 20])
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    model(model.random_gradients(dist.get_rank(), 0)).backward()
    lanes = handle.session.lanes
    wired = all(lane.link.wire is not None for lane in lanes.data)
    assert isinstance(lanes._heartbeats, Heartbeats)
    beating = len(lanes._heartbeats._connections) == dist.get_world_size() - 1
    handle.detach()
    del handle, lanes
    deadline = time.monotonic() + 10
    while (left := len(os.listdir("/proc/self/fd")) - before) > may_leave and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)  # threads close what they used
    dist.barrier()
    return wired, beating, left


@contextlib.contextmanager
def busy_with_connections() -> Iterator[list[int]]:
    """Another thread opens and closes TCP connections all the time; how often so far."""
    counted, ends = [0], threading.Event()

    def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            while not ends.is_set():
                with socket.create_connection(server.getsockname()), server.accept()[0]:
                    counted[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield counted
    finally:
        ends.set()
        thread.join()


def beside_other_connections() -> list[tuple[bool, bool]]:
    with busy_with_connections() as counted:
        found = [connected()[:2] for _ in range(5)]
        assert counted[0] > 10
    return found


def test_connections_of_other_threads_cost_nothing(worlds: Worlds) -> None:
    for found in worlds.run(2, beside_other_connections):
        assert found == [(True, True)] * 5


def among_strangers(saying: bytes, count: int, encrypts: bool) -> tuple[bool, bool, int, bool]:
    """So many strangers call each rank before the other rank does, and stay. Also whether all are hung up on in the end."""
    connected()  # what a first handle leaves is no stranger's
    strangers = Strangers([saying] * count)
    with strangers.first(), mock.patch.dict(os.environ, GRADWIRE_TLS="on" if encrypts else "off"):
        wired, beating, left = connected(count)
    hung_up = len(strangers.calls) == count and all(map(is_hung_up, strangers.calls))
    strangers.leave()
    return wired, beating, left - count, hung_up


def is_hung_up(connection: socket.socket) -> bool:
    connection.settimeout(5.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(("saying", "count"), [(SAYINGS[0], 100), (SAYINGS[2], 10), (SAYINGS[1], 3)])
def test_strangers_cost_nothing_and_leave_nothing(worlds: Worlds, saying: bytes, count: int, encrypts: bool) -> None:
    for wired, beating, left, hung_up in worlds.run(2, among_strangers, saying, count, encrypts):
        assert wired and beating and hung_up
        assert left <= 0


def impostor_calls() -> str:
    """A process that knows everything but the key calls rank 0 as rank 1."""
    connect, told = Rendezvous.connect, ""

    def disturbed(self: Rendezvous, names: list[str]) -> None:
        nonlocal told
        if dist.get_rank() == 1 and not self._complete:
            card = self._cards[0]
            for name in names:
                hello = rendezvous._HELLO.pack(1, name.encode(), bytes(16))
                with socket.create_connection((card.host, card.port)) as impostor:
                    impostor.sendall(hello + bytes(32))
                    told += "" if is_hung_up(impostor) else f"{name} was answered. "
        connect(self, names)

    Rendezvous.connect = disturbed  # type: ignore[method-assign]
    try:
        wired, beating, _ = connected()
    finally:
        Rendezvous.connect = connect  # type: ignore[method-assign]
    return told + ("" if wired and beating else "connections were lost")


def test_a_rank_without_the_key_is_not_believed(worlds: Worlds) -> None:
    assert worlds.run(2, impostor_calls) == ["", ""]


def listens_in_place_of_rank_0() -> str:
    """Somebody who does not know the key answers at rank 0's address."""
    if dist.get_rank() == 0:
        rendezvous._listen = somebody_else
    with pytest.raises(gw.CommunicationError) as caught:
        connected()
    return str(caught.value)


class AnotherAddress(socket.socket):
    """A listener that says it has another one's address."""

    other: socket.socket

    def getsockname(self) -> Any:
        return self.other.getsockname()


def somebody_else(host: str) -> socket.socket:
    """A rank's listener, where somebody else listens at the address that it tells, and answers nonsense."""
    server = socket.create_server((host, 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.recv(1000)
                connection.sendall(bytes(32))

    threading.Thread(target=answer, daemon=True).start()
    told = AnotherAddress()
    told.other = server
    told.bind((host, 0))
    told.listen()
    told.setblocking(False)
    return told


def test_whoever_answers_without_the_key_is_not_believed() -> None:
    with World(2, group_timeout_s=5.0) as world:
        _, told = world.run(listens_in_place_of_rank_0)
    assert "is no rank of this job" in told


def ports_of_a_handle() -> int:
    before = len(listening_ports())
    model = Given([300, 20])
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    ports = len(listening_ports()) - before
    handle.detach()
    return ports


def test_nothing_listens_once_ranks_are_connected(worlds: Worlds) -> None:
    assert worlds.run(2, ports_of_a_handle) == [0, 0]


def a_stranger_writes_failed() -> tuple[list[int], dict[int, str]]:
    """Somebody without the key writes into the store that rank 1 failed, then rank 1 says so itself."""
    model = Given([300, 20])
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    lanes, found = handle.session.lanes, ([], {})  # type: tuple[list[int], dict[int, str]]
    if dist.get_rank() == 0:
        page = lanes.group.store(f"{lanes.name}/failed")
        for line in ("1 stop at once", "\n1 c3RvcCBhdCBvbmNl\n", "no line"):
            page.append("signatures", line)
        found = lanes._roll_call.missing(0.3)[:2]
    dist.barrier()
    if dist.get_rank() == 1:
        lanes._roll_call.sign("out of memory", 2.0)
    dist.barrier()
    if dist.get_rank() == 0:
        assert lanes._roll_call.missing(2.0)[:3] == ([], {1: "out of memory"}, True)
    dist.barrier()
    handle.detach()
    return found


def test_who_failed_is_believed_of_ranks_alone(worlds: Worlds) -> None:
    assert worlds.run(2, a_stranger_writes_failed)[0] == ([1], {})


def with_few_descriptors(limit: int) -> str:
    with (
        mock.patch("gradwire.transport.addresses.resource.getrlimit", return_value=(limit, limit)),
        pytest.raises(gw.GradwireError) as caught,
    ):
        gw.parallelize(torch.nn.Linear(3, 3), plan=gw.QSGD(bits=4))
    return str(caught.value)


def test_too_few_descriptors_are_told_before_any_is_used(worlds: Worlds) -> None:
    for told in worlds.run(3, with_few_descriptors, 64):
        assert "12 connections to other ranks need 12 descriptors" in told
        assert "the limit is 64. Raise it to at least" in told
