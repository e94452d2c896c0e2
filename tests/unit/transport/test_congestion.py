import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gradwire.transport import rendezvous


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        caller = stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
        yield caller


def _control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def _choose(connection: socket.socket, control: bytes) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)
    except (AttributeError, OSError) as error:
        pytest.skip(f"{control.decode()} cannot be chosen here: {error}")


def test_a_short_connection_is_not_paced_by_bbr(connection: socket.socket) -> None:
    _choose(connection, b"bbr")
    rendezvous.tune(connection)
    assert _control(connection) == b"reno"


def test_a_long_connection_takes_bbr(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(connection, b"bbr")
    _choose(connection, b"reno")
    assert rendezvous.long_control() == "bbr"
    monkeypatch.setattr(rendezvous, "_SHORT_US", 0)
    rendezvous.tune(connection)
    assert _control(connection) == b"bbr"


def test_much_may_be_on_its_way_on_a_long_connection_alone(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    rendezvous.tune(connection)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == room
    monkeypatch.setattr(rendezvous, "_SHORT_US", 0)
    rendezvous.tune(connection)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 8 * room
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_another_control_stays_on_a_short_connection(connection: socket.socket) -> None:
    _choose(connection, b"reno")
    rendezvous.tune(connection)
    assert _control(connection) == b"reno"


def test_what_the_system_does_not_allow_changes_nothing(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(connection, b"reno")
    monkeypatch.setattr(rendezvous, "_SHORT_US", 0)
    monkeypatch.setattr(rendezvous, "_BBR", "no such control")
    assert rendezvous.tune(connection) > 0
    assert _control(connection) == b"reno"
