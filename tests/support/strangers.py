"""Strangers: connections to the ports at which a process listens, of somebody who is no rank."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

from gradwire.transport.rendezvous import Rendezvous

__all__ = ["SAYINGS", "Strangers", "listening_ports"]

SAYINGS = (b"", b"\1" * 10, b"GET / HTTP/1.1\r\n\r\n" + bytes(100))


def listening_ports() -> list[int]:
    """The TCP ports at which this process listens."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        found += [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return found


class Strangers:
    """Strangers who call this process and stay until `leave`."""

    def __init__(self, sayings: Sequence[bytes] = SAYINGS) -> None:
        self._sayings = sayings
        self.calls: list[socket.socket] = []

    def call(self, host: str, port: int) -> None:
        """Call a port: one stranger for each saying."""
        for saying in self._sayings:
            self.calls.append(socket.create_connection((host, port)))
            self.calls[-1].sendall(saying)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Ranks that connect inside are called by strangers before any rank calls them."""
        connect = Rendezvous.connect

        def disturbed(meeting: Rendezvous, names: Sequence[str]) -> None:
            if meeting._listener is not None and not meeting._complete:
                self.call(*meeting._listener.getsockname()[:2])
            connect(meeting, names)

        Rendezvous.connect = disturbed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Rendezvous.connect = connect  # type: ignore[method-assign]

    def leave(self) -> None:
        """Hang up."""
        for each in self.calls:
            each.close()
