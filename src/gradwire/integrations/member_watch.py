"""Finds members that end while all members meet, and a lighthouse that ends while a member asks it.

Members that meet wait for each other in a store, where a member that was killed would be missed only after the timeout. Each
member therefore connects with the store that every other member serves. Nothing is sent. When a process ends its kernel closes
the connection, or refuses it. A machine that loses power does neither: then the timeout ends the wait.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from gradwire.errors import PlanError
from gradwire.transport import LinkError

__all__ = ["LighthouseLine", "MemberWatch", "host_and_port", "url_of"]

_CONNECT_S = 1.0


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT.

    >>> host_and_port("[::1]:29500")
    ('::1', 29500)
    """
    place = urlsplit(f"//{address}")
    return place.hostname or "", place.port or 0


def url_of(address: str) -> SplitResult:
    """The URL of a lighthouse at this URL or HOST:PORT. Raises PlanError.

    >>> url_of("node0:29510").port
    29510
    """
    url = urlsplit(address if "://" in address else f"http://{address}")
    try:
        is_whole = bool(url.hostname and url.port)
    except ValueError:  # of a port that is no number, or is too large
        is_whole = False
    if not is_whole:
        raise PlanError(
            f"lighthouse is {address!r}, and members need the host and the port of `gradwire lighthouse`: HOST:29510, or "
            "[::1]:29510 where the host is an IPv6 address"
        )
    return url


class MemberWatch:
    """Connections to the stores of other members."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """addresses: of the stores, as HOST:PORT."""
        self._connections: dict[str, socket.socket] = {}
        for each in addresses:
            with suppress(OSError):  # a name that is not found here: the timeout ends a wait for this member
                family, kind, _, _, place = socket.getaddrinfo(*host_and_port(each), type=socket.SOCK_STREAM)[0]
                connection = self._connections[each] = socket.socket(family, kind)
                connection.setblocking(False)
                connection.connect_ex(place)

    def check(self) -> None:
        """Raise LinkError if a process ended since the watch began, or before."""
        for address, connection in list(self._connections.items()):
            try:
                is_gone = not connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # it says nothing, or is not connected yet
                continue
            except OSError:
                is_gone = True
            if is_gone:
                raise LinkError(None, ConnectionError(f"the member whose store is at {address} ended"))

    def close(self) -> None:
        connections, self._connections = self._connections, {}
        for each in connections.values():
            each.close()


class LighthouseLine:
    """A connection with the lighthouse, which ends when the lighthouse does. Nothing is sent."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT."""
        self._address = address
        self._watch: MemberWatch | None = None
        """None: it ended, or there was none yet."""

    def finds_another(self) -> bool:
        """Whether a lighthouse is there that was not there at the last call: it knows no earlier request."""
        if self._watch is not None:
            try:
                self._watch.check()
                return False
            except LinkError:
                self.close()
        with suppress(OSError):
            socket.create_connection(host_and_port(self._address), _CONNECT_S).close()
            self._watch = MemberWatch([self._address])
        return self._watch is not None

    def close(self) -> None:
        """Watch no more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
