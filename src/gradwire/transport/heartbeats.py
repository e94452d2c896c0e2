"""Heartbeats: finding ranks that fall silent without closing, such as those of a machine that lost power.

A killed process closes its connections, and the other ranks notice at once. A machine without power closes nothing: whoever
waits for it would wait until the timeout. So each rank has one more connection to each of a few neighbours, without data. The
kernels at its two ends ask each other for a sign of life (TCP keepalive). They answer also for a rank that computes, or that
was stopped: such a rank is slow, not dead. Whoever finds a dead rank sends the news to its other neighbours, which pass it on.

A connection that carries gradients cannot tell. A slow rank does not read, so its window closes, and the kernel's limit for
silence (TCP_USER_TIMEOUT) also counts the time in which a window is closed.
"""

import errno
import hmac
import math
import select
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from gradwire.transport.forks import close_in_child
from gradwire.transport.keys import PROOF_BYTES, JobKey

IDLE_S, INTERVAL_S = 2, 1
"""The first question comes after so much silence, the next ones in this interval."""
SHORTEST_S, LONGEST_S = 4.0, 120.0
"""The least and the longest silence after which a machine may count as dead: kernels count up to 127 questions."""
_RANK_BYTES = 4
_LEFT = (0, errno.ECONNRESET, errno.EPIPE)
"""The errors of a connection that the other rank closed."""


def usual_silence_s(timeout_s: float) -> float:
    """The silence after which a machine counts as dead if the caller names none: a sixtieth of the timeout, but 7 to 30 s.

    Whoever waits for ranks for half an hour has a network that may be away for half a minute.
    """
    return min(max(7.0, timeout_s / 60), 30.0)


class SilenceNews(NamedTuple):
    """The news that the machine of a rank is silent: the rank, and a proof that a rank of this meeting says so."""

    key: JobKey
    meeting: str

    @property
    def size(self) -> int:
        return _RANK_BYTES + PROOF_BYTES

    def of(self, rank: int) -> bytes:
        told = rank.to_bytes(_RANK_BYTES, "little")
        return told + self.key.proof(b"silent", self.meeting.encode(), told)

    def rank(self, came: bytes) -> int | None:
        """The rank that the news is of; None if no rank of the meeting sent it.

        >>> news = SilenceNews(JobKey(bytes(32)), "meeting")
        >>> news.rank(news.of(7)), news.rank(bytes(news.size))
        (7, None)
        """
        rank = int.from_bytes(came[:_RANK_BYTES], "little")
        return rank if hmac.compare_digest(came, self.of(rank)) else None


class Heartbeats:
    """Watches the machines of other ranks, in a thread that sleeps until one of them falls silent."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        name: str,
        on_silence: Callable[[], None],
        silence_s: float,
        news: SilenceNews,
    ) -> None:
        """`connections`: to the neighbours; they are closed here. `on_silence`: a method, which this does not keep alive; called
        in the thread `name` when a neighbour has not answered for `silence_s`, or news of a silent rank came."""
        self._connections = dict(connections)
        self._dead: set[int] = set()
        self._left: set[int] = set()
        for each in self._connections.values():
            _keep_alive(each, silence_s)
        watch = _Watch(self._connections, self._dead, self._left, weakref.WeakMethod(on_silence), news)
        # a daemon: it must not keep the process alive
        thread = threading.Thread(target=watch.run, name=name, daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._connections, thread)
        close_in_child(self)

    def silent(self) -> list[int]:
        """The ranks whose machines do not answer: those that are dead, and neighbours that have left the last questions open."""
        return sorted(self._dead | {rank for rank, each in self._connections.items() if _open_questions(each) > 1})

    def gone(self) -> list[int]:
        """The neighbours that closed their connection: their process ended, or their lanes did."""
        return sorted(self._left)

    def stop(self) -> None:
        """Watch no more. Other ranks take that for a rank that left."""
        self._finalizer()

    def close_copies(self) -> None:
        """Close the copies in a forked process, whose end must not shut down the connections of its parent."""
        for each in self._connections.values():
            each.close()


def _keep_alive(connection: socket.socket, silence_s: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # the first question may come just after the silence began, and the last one must come after it has lasted that long
    missed = math.ceil(silence_s / INTERVAL_S) + 1
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", missed)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _open_questions(connection: socket.socket) -> int:
    """How many questions in succession got no answer: `tcpi_probes`, the fourth byte of Linux's TCP_INFO."""
    with suppress(OSError):  # closed
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[3]
    return 0


class _Watch:
    """The work of the thread. It knows no `Heartbeats`, so that these may go."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        dead: set[int],
        left: set[int],
        on_silence: "weakref.WeakMethod[Callable[[], None]]",
        news: SilenceNews,
    ) -> None:
        self._connections, self._dead, self._left, self._on_silence, self._news = connections, dead, left, on_silence, news
        self._came = dict.fromkeys(connections, b"")
        """The first bytes of news of each neighbour."""

    def run(self) -> None:
        """Watch until all neighbours are gone."""
        waiting, ranks = select.poll(), {each.fileno(): rank for rank, each in self._connections.items()}
        for number in ranks:
            waiting.register(number, select.POLLIN)
        while ranks:
            for number, _ in waiting.poll():
                rank = ranks[number]
                found = self._look(rank)
                if rank in self._left or rank == found:
                    waiting.unregister(number)
                    del ranks[number]
                if found is not None and found not in self._dead:
                    self._found_dead(found)
        for each in self._connections.values():
            each.close()

    def _look(self, rank: int) -> int | None:
        """Look at the connection to a neighbour. Returns a dead rank: the neighbour, or that of its news."""
        try:
            more = self._connections[rank].recv(self._news.size - len(self._came[rank]), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _LEFT:
                return rank
            more = b""
        self._came[rank] += more
        if not more:
            self._left.add(rank)
        if len(self._came[rank]) < self._news.size:
            return None
        came, self._came[rank] = self._came[rank], b""
        if (found := self._news.rank(came)) is None:
            self._left.add(rank)  # a stranger writes into the connection
        return found

    def _found_dead(self, rank: int) -> None:
        self._dead.add(rank)
        for neighbour, connection in self._connections.items():
            if neighbour not in self._dead and neighbour not in self._left:
                with suppress(OSError):  # it has just left, or its queue is full: then it does not answer either
                    connection.send(self._news.of(rank), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if (told := self._on_silence()) is not None:
            told()


def _stop(connections: Mapping[int, socket.socket], thread: threading.Thread) -> None:
    for each in connections.values():
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # which wakes the thread
    if thread is not threading.current_thread():
        thread.join(timeout=2.0)
