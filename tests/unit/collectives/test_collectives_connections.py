"""Shutting down the connections of a gloo backend, and never anybody else's."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from gradwire.transport.link import Connections


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@contextlib.contextmanager
def connection(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        near.settimeout(1), far.settimeout(1)
        with far:
            yield near, far


def is_open(ends: tuple[socket.socket, socket.socket]) -> bool:
    with contextlib.suppress(OSError):
        ends[0].sendall(b"x")
        return ends[1].recv(1) == b"x"
    return False


def test_both_directions_end_and_the_descriptor_stays(listener: socket.socket) -> None:
    connections = Connections()
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(connection(listener))
        with connections.opened_here(expected=2):
            ends = stack.enter_context(connection(listener))
        connections.shut_down()
        assert ends[0].recv(1) == ends[1].recv(1) == b""
        assert ends[0].fileno() >= 0
        os.fstat(ends[0].fileno())
        assert is_open(before)


def test_none_is_touched_when_somebody_else_opened_one_meanwhile(listener: socket.socket) -> None:
    connections = Connections()
    with contextlib.ExitStack() as stack:
        with connections.opened_here(expected=2):
            both = [stack.enter_context(connection(listener)) for _ in range(2)]
        connections.shut_down()
        assert all(map(is_open, both))


def test_a_number_that_was_used_again_is_not_touched(listener: socket.socket) -> None:
    connections = Connections()
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        with connections.opened_here(expected=2):
            numbers = {end.fileno() for end in first.enter_context(connection(listener))}
        first.close()
        second = stack.enter_context(connection(listener))
        assert {end.fileno() for end in second} & numbers
        connections.shut_down()
        assert is_open(second)


def test_what_is_no_connection_is_not_counted(listener: socket.socket) -> None:
    connections = Connections()
    with connections.opened_here(expected=0), contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for end in socket.socketpair():
            stack.enter_context(end)
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
    connections.shut_down()
