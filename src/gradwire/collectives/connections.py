"""The TCP connections of a gloo backend, which gloo itself neither shows nor closes while a thread waits on them.

Shutting them down is the one way to end a wait that nobody will answer: the waiting thread gets an error at once, and
so do the ranks at the other ends.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Connections"]

_DESCRIPTORS = "/dev/fd"


class Connections:
    """Connections of this process that were opened in a block.

    >>> connections = Connections()
    >>> with connections.opened_here(expected=0):
    ...     pass
    >>> connections.shut_down()
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    @contextmanager
    def opened_here(self, expected: int) -> Iterator[None]:
        """Remember those opened in the block. Where it is not as many as expected (another thread opened one meanwhile,
        the backend connects later), none is remembered: another's connection must never be shut down."""
        before = _connected()
        yield
        opened = {number: inode for number, inode in _connected().items() if before.get(number) != inode}
        self._inodes = opened if len(opened) == expected else {}

    def shut_down(self) -> None:
        """End both directions of those that are still there. The descriptors stay their owner's."""
        now = _connected()
        for number, inode in self._inodes.items():
            if now.get(number) == inode:
                with contextlib.suppress(OSError), _borrowed(number) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._inodes = {}


def _connected() -> dict[int, int]:
    """Descriptors of connected TCP sockets, with the inode, since numbers are used again."""
    found = {}
    with contextlib.suppress(OSError):  # no such folder on this system
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                status = os.fstat(int(entry))
                if stat.S_ISSOCK(status.st_mode):
                    with _borrowed(int(entry)) as connection:
                        if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                            connection.getpeername()
                            found[int(entry)] = status.st_ino
    return found


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(number)) as connection:
        yield connection
