"""Heartbeats: finding ranks that fall silent without closing, such as those of a machine that lost power.

A killed process closes its connections, and the other ranks notice at once. A machine without power closes nothing: whoever
waits for it would wait until the timeout. So each pair of ranks has one more connection, which never carries data. The
kernels at its two ends ask each other for a sign of life (TCP keepalive). They answer also for a rank that computes, or that
was stopped: such a rank is slow, not dead.

A connection that carries gradients cannot tell. A slow rank does not read, so its window closes, and the kernel's limit for
silence (TCP_USER_TIMEOUT) also counts the time in which a window is closed.
"""

import errno
import math
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

IDLE_S, INTERVAL_S = 2, 1
"""The first question comes after so much silence, the next ones in this interval."""
SHORTEST_S, LONGEST_S = 4.0, 120.0
"""The least and the longest silence after which a machine may count as dead: kernels count up to 127 questions."""
_LEFT = (0, errno.ECONNRESET, errno.EPIPE)
"""The errors of a connection that the other rank closed."""


def usual_silence_s(timeout_s: float) -> float:
    """The silence after which a machine counts as dead if the caller names none: a sixtieth of the timeout, but 7 to 30 s.

    Whoever waits for ranks for half an hour has a network that may be away for half a minute.
    """
    return min(max(7.0, timeout_s / 60), 30.0)


class Heartbeats:
    """Watches the machines of other ranks, in a thread that sleeps until one of them falls silent."""

    def __init__(
        self, connections: Mapping[int, socket.socket], name: str, on_silence: Callable[[], None], silence_s: float
    ) -> None:
        """`connections`: to each other rank; they are closed here. `on_silence`: a method, which this does not keep alive; called
        in the thread `name` when a rank has not answered for `silence_s`."""
        self._connections = dict(connections)
        self._dead: set[int] = set()
        for each in self._connections.values():
            _keep_alive(each, silence_s)
        # a daemon: it must not keep the process alive
        thread = threading.Thread(
            target=_watch, args=(self._connections, self._dead, weakref.WeakMethod(on_silence)), name=name, daemon=True
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._connections, thread)
        _all.add(self)

    def silent(self) -> list[int]:
        """The ranks whose machines do not answer: those that are dead, and those that have left the last questions open."""
        return sorted(self._dead | {rank for rank, each in self._connections.items() if _open_questions(each) > 1})

    def stop(self) -> None:
        """Watch no more. Other ranks take that for a rank that left."""
        self._finalizer()

    def close_copies(self) -> None:
        """Close the copies in a forked process, whose end must not shut down the connections of its parent."""
        for each in self._connections.values():
            each.close()


_all: "weakref.WeakSet[Heartbeats]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for each in _all:
        each.close_copies()


os.register_at_fork(after_in_child=_leave_to_parent)


def _keep_alive(connection: socket.socket, silence_s: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # the first question may come just after the silence began, and the last one must come after it has lasted that long
    missed = math.ceil(silence_s / INTERVAL_S) + 1
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", missed)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _open_questions(connection: socket.socket) -> int:
    """How many questions in succession got no answer: `tcpi_probes`, the fourth byte of Linux's TCP_INFO."""
    with suppress(OSError, AttributeError):  # closed; another system
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[3]
    return 0


def _watch(
    connections: Mapping[int, socket.socket], dead: set[int], on_silence: "weakref.WeakMethod[Callable[[], None]]"
) -> None:
    waiting, ranks = select.poll(), {each.fileno(): rank for rank, each in connections.items()}
    for number in ranks:
        waiting.register(number, select.POLLIN)
    while ranks:
        for number, _ in waiting.poll():
            waiting.unregister(number)
            rank = ranks.pop(number)
            if connections[rank].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _LEFT:
                continue
            dead.add(rank)
            if (told := on_silence()) is not None:
                told()
            del told
    for each in connections.values():
        each.close()


def _stop(connections: Mapping[int, socket.socket], thread: threading.Thread) -> None:
    for each in connections.values():
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # which wakes the thread
    if thread is not threading.current_thread():
        thread.join(timeout=2.0)
