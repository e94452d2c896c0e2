"""The TCP connections of a gloo backend. Gloo neither shows its connections nor closes them while a thread waits.

Shutting the connections down is the only way to end such a wait: the waiting thread and the ranks at the other ends get an error.
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
    """The connections that this process opened inside a block.

    >>> connections = Connections()
    >>> with connections.opened_here(expected=0):
    ...     pass
    >>> connections.shut_down()
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}

    @contextmanager
    def opened_here(self, expected: int) -> Iterator[None]:
        """Remember the connections opened inside. If their number is not `expected`, because another thread opened one or the
        backend connects later, remember none: connections of others must not be shut down."""
        before = _connected()
        yield
        opened = {number: inode for number, inode in _connected().items() if before.get(number) != inode}
        self._inodes = opened if len(opened) == expected else {}

    def shut_down(self) -> None:
        """Shut down both directions of the remembered connections. Their owner keeps the descriptors."""
        now = _connected()
        for number, inode in self._inodes.items():
            if now.get(number) == inode:
                with contextlib.suppress(OSError), _borrowed(number) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._inodes = {}


def _connected() -> dict[int, int]:
    """Descriptors of connected TCP sockets with their inodes, since numbers are reused."""
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
