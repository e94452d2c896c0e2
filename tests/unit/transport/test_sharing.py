"""Descriptors of shared memory on their way between ranks: the system limits how many one user may have on the way at a time."""

import errno
import logging
import socket
import threading
from typing import Any, cast

import pytest

from gradwire.transport import Lanes, Wire, sharing
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.rings import Rings

LANES = 4


class Rung:
    """Takes the place of a wire: keeps the memory."""

    def __init__(self) -> None:
        self.rings: dict[int, Rings] = {}

    def connect(self, ranks: Any) -> None:
        pass

    def share(self, peer: int, rings: Rings) -> None:
        self.rings[peer] = rings


def shared_with(group: InProcessGroup) -> list[list[int]]:
    """The ranks with which each lane of this rank shares memory."""
    lanes, wires = Lanes(group), [Rung() for _ in range(LANES)]
    lanes.control.submit(lambda link: sharing.share_memory_of_machines(link, group.grid, cast(list[Wire], wires))).result()
    found = [sorted(wire.rings) for wire in wires]
    for rings in (each for wire in wires for each in wire.rings.values()):
        rings.close()
    lanes.stop()
    return found


class Counting:
    """Counts the descriptors on their way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._lock, self._send, self._receive = threading.Lock(), socket.send_fds, socket.recv_fds
        monkeypatch.setattr(socket, "send_fds", self.send)
        monkeypatch.setattr(socket, "recv_fds", self.receive)

    def _count(self, more: int) -> None:
        with self._lock:
            self.now += more
            self.most = max(self.most, self.now)

    def send(self, connection: socket.socket, buffers: Any, numbers: list[int]) -> int:
        self._count(len(numbers))
        return self._send(connection, buffers, numbers)

    def receive(self, *arguments: Any) -> Any:
        received = self._receive(*arguments)
        self._count(-len(received[1]))
        return received


@pytest.mark.parametrize(("limit", "most"), [(256, 128), (4096, 336)])
def test_few_descriptors_are_on_their_way_at_a_time(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    monkeypatch.setattr(sharing, "_descriptor_limit", lambda: limit)
    told = run_ranks(8, shared_with)
    assert told == [[[other for other in range(8) if other != rank]] * LANES for rank in range(8)]
    assert 0 < counting.most <= most and counting.now == 0


def test_a_limit_that_is_passed_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuses(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    monkeypatch.setattr(socket, "send_fds", refuses)
    monkeypatch.setattr(sharing, "_descriptor_limit", lambda: 20)
    with caplog.at_level(logging.WARNING):
        assert run_ranks(3, shared_with) == [[[]] * LANES] * 3
    (words,) = [record.getMessage() for record in caplog.records if "share a machine and no memory" in record.getMessage()]
    assert "Too many references" in words and "24 descriptors" in words and "`ulimit -n 48`" in words
