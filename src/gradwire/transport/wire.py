"""A wire: the TCP connections of one lane to other ranks, on which C++ runs whole phases (`operations`).

Gloo has a thread of its own for each link, which every message wakes, and Python submits and awaits message by message. On a core
that also computes, these took more time than encoding and decoding. A wire needs neither: the lane's thread sends and
receives in the same call that encodes and decodes. Messages to ranks of the same node may travel through memory (`share`).
"""

import ctypes
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from ctypes import c_double, c_int64
from functools import cache
from typing import Any

from gradwire.core import native
from gradwire.transport.forks import close_in_child
from gradwire.transport.meter import Meter
from gradwire.transport.operations import Operations, Outcome, refused
from gradwire.transport.rings import Connection, Rings
from gradwire.transport.tls import Connected, EncryptedSocket

Reach = Callable[[Sequence[int]], Mapping[int, Connected]]
"""Connects with ranks that are not connected yet, and gives the connections out. Raises LinkError."""
_RUNS_OF_A_KEY = 64
"""After so many lists of operations a wire looks whether an encrypted connection needs a new key."""


class LinkError(Exception):
    """A transfer failed. `peer` is the other rank within the group, None for a collective of all ranks."""

    def __init__(self, peer: int | None, cause: Exception) -> None:
        super().__init__(str(cause).strip() or type(cause).__name__)
        self.peer = peer


class DamagedError(LinkError):
    """Bytes of that rank were changed on the way."""


@contextmanager
def transfer(peer: int | None = None) -> Iterator[None]:
    """Turn errors of a backend into LinkError."""
    try:
        yield
    except LinkError:
        raise
    except Exception as error:
        raise LinkError(peer, error) from error


class Wire:
    """Used by one thread, but for `shut_down`."""

    def __init__(self, world_size: int, sockets: Mapping[int, Connected], timeout_s: float, reach: Reach | None = None) -> None:
        """`sockets`: of other ranks. `reach`: connects with more ranks; None: all are there."""
        self._sockets: dict[int, Connected] = {}
        self._timeout_s, self._reach = timeout_s, reach
        self._rings: dict[int, Rings] = {}
        self._connections = (Connection * world_size)()
        self._is_shut = False
        for each in self._connections:
            each.fd = -1
        self._add(sockets)
        self._runs = 0
        close_in_child(self)

    def _add(self, sockets: Mapping[int, Connected]) -> None:
        for rank, each in sockets.items():
            self._connections[rank].fd = each.fileno()
            if isinstance(each, EncryptedSocket):
                self._connections[rank].tls = ctypes.addressof(each.session)
        self._sockets = self._sockets | dict(sockets)  # another thread may look at the old one
        if self._is_shut:
            self.shut_down()

    def connect(self, ranks: Set[int]) -> None:
        """Connect with those of these ranks that are not connected yet. The other ranks do the same, or run a list with messages
        from or to this one. Raises LinkError, CommunicationError where descriptors are short."""
        if (missing := ranks - self._sockets.keys()) and self._reach is not None:
            self._add(self._reach(sorted(missing)))

    def share(self, peer: int, rings: Rings) -> None:
        """Pass messages to and from that rank through memory from now on. Its connection then shows only whether the
        rank is gone. Both ranks do this before they run anything."""
        self._rings[peer] = rings
        entry = self._connections[peer]
        (entry.out, entry.into), (entry.bell, entry.peer_bell) = rings.addresses, rings.bells
        entry.capacity = rings.capacity

    @property
    def connections(self) -> int:
        """How many ranks this one is connected with."""
        return len(self._sockets)

    @property
    def shared_with(self) -> list[int]:
        """The ranks with which this one shares memory."""
        return sorted(self._rings)

    def run(self, operations: Operations, meter: Meter) -> None:
        """Run a list of operations. Raises LinkError where a connection fails, DamagedError where it changed bytes, PayloadError
        for what no encode writes, RuntimeError where a kernel refuses its arguments."""
        self.connect(operations.peers)
        if self._is_shut and self._rings:  # rings have room for messages that nobody will read
            raise LinkError(min(self._rings), ConnectionError("the connection was shut down"))
        outcome, array = Outcome(), operations.array
        times = (c_double * (2 * len(array)))() if meter.spans is not None else None
        world_size = len(self._connections)
        if _run()(self._connections, world_size, self._timeout_s, array, len(array), times, ctypes.byref(outcome)):
            words = outcome.words.decode(errors="replace")
            if outcome.peer >= 0:
                raise (DamagedError if outcome.damaged else LinkError)(outcome.peer, ConnectionError(words))
            raise refused(words)
        self._runs += 1
        if self._runs % _RUNS_OF_A_KEY == 0:
            for each in self._sockets.values():
                if isinstance(each, EncryptedSocket):
                    each.renew_key()
        meter.codec_seconds += outcome.codec_seconds
        if meter.spans is not None and times is not None:
            meter.spans += operations.spans(list(times))

    def shut_down(self) -> None:
        """Fail all waits, here and on the other ranks, at once. For any thread."""
        self._is_shut = True
        for each in self._sockets.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections. Nothing may run."""
        for each in self._sockets.values():
            each.close()
        for rings in self._rings.values():
            rings.close()

    close_copies = close


@cache
def _run() -> Any:
    function = native.library()["gw_run_operations"]
    function.argtypes = (*(ctypes.c_void_p, c_int64, c_double, ctypes.c_void_p, c_int64, ctypes.c_void_p, ctypes.c_void_p),)
    function.restype = c_int64
    return function
