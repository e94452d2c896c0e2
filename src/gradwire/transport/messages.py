"""Messages between ranks over a TCP connection for each pair, moved by the thread that waits: the backend of links on CPUs.

It carries everything but gradients, and gradients too where wires cannot (`gradwire.transport.wire`). A message is a header with
its length and tag, and its bytes. Messages of one tag arrive in order; those that come early are kept until they are asked for.
"""

import ctypes
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gradwire.transport.forks import close_in_child
from gradwire.transport.rounds import MergeRound, merge_peers, merge_rounds
from gradwire.transport.tls import Connected, TlsError
from gradwire.transport.wire import DamagedError, LinkError, Reach

_HEADER = struct.Struct("<QQ")
"""The bytes of the message, and its tag."""
_OF_RANK = struct.Struct("<Q")
"""The number of bytes of one rank that follow, where ranks gather."""
_COLLECTIVE_TAGS = 2**40
"""The first tag of collectives."""
_DIRECT_BYTES = 2**18
"""Up to so many bytes from all ranks together each rank sends its part to every other one: one hop."""
_CHAIN_BYTES = 2**20
"""A broadcast of so many bytes or more may pass from rank to rank in pieces, so that each rank sends them once."""
_PIECE_BYTES = 2**18
_MOST_MS = 60_000

REDUCTIONS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
}
_OF_ROWS: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {torch.maximum: torch.amax, torch.minimum: torch.amin}
"""Reductions of many rows at once that give the bits of one row after another."""


def reduction(op: Any) -> str:
    """The name of an operation among `REDUCTIONS`. Raises ValueError for others."""
    name = next((name for name, (known, _) in REDUCTIONS.items() if op == known), None)
    if name is None:
        raise ValueError(f"{op} is none of {', '.join(REDUCTIONS)}")
    return name


class _Moving:
    """A message on its way to or from a rank."""

    def __init__(self, messages: "Messages", rank: int) -> None:
        self._messages, self.rank = messages, rank
        self.is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done. Raises ConnectionError, TimeoutError, ValueError for a message of another length, and
        DamagedError for bytes that the other rank did not encrypt."""
        self._messages.wait(self, timeout)
        return True


class _Sending(_Moving):
    def __init__(self, messages: "Messages", rank: int, tag: int, what: memoryview, owner: Any) -> None:
        super().__init__(messages, rank)
        self.parts = [memoryview(_HEADER.pack(len(what), tag)), what]
        self._owner = owner  # of the memory


class _Receiving(_Moving):
    def __init__(self, messages: "Messages", rank: int, tag: int, into: torch.Tensor | None) -> None:
        """`into`: None for a message of any length."""
        super().__init__(messages, rank)
        self.tag, self._target = tag, into
        self._staged = into if into is None or (into.is_cpu and into.is_contiguous()) else torch.empty_like(into, device="cpu")
        self.bytes = memoryview(b"") if self._staged is None else bytes_in(self._staged)
        self.at = 0
        self.problem: ValueError | None = None

    def begin(self, count: int) -> None:
        """A message of so many bytes comes."""
        if self._staged is not None and count != len(self.bytes):
            self.problem = ValueError(f"rank {self.rank} sent {count} bytes where {len(self.bytes)} were expected")
        if self._staged is None or self.problem is not None:
            self.bytes = memoryview(bytearray(count))

    def end(self) -> None:
        if self._target is not None and self._staged is not None and self._staged is not self._target and self.problem is None:
            self._target.copy_(self._staged)
        self.is_done = True


class _Peer:
    """The connection to another rank."""

    def __init__(self, rank: int, connection: Connected) -> None:
        self.rank, self.connection, self.number = rank, connection, connection.fileno()
        self.sending: deque[_Sending] = deque()
        self.expected: defaultdict[int, deque[weakref.ref[_Receiving]]] = defaultdict(deque)
        """Receives by tag. One that was dropped takes no message."""
        self.early: defaultdict[int, deque[_Receiving]] = defaultdict(deque)
        """Messages that nobody expected yet."""
        self.header = bytearray()
        self.receiving: _Receiving | None = None
        self.tag = 0
        self.watched = 0
        """The events that are polled for."""
        self.error: OSError | None = None


class Ends:
    """The connections of a link's backend. Of NCCL nothing is known, and `abort` ends them."""

    def has_lost_a_rank(self) -> bool:
        """Whether another rank has closed its end."""
        return False

    def shut_down(self) -> None:
        """Fail all waits of the link, here and on the other ranks, at once. For any thread."""

    def close(self) -> None:
        """Close them. Nothing may run."""


class Messages(Ends):
    """One end of a link. Used by one thread, but for `shut_down`."""

    def __init__(
        self, connections: Mapping[int, Connected], rank: int, world_size: int, timeout: timedelta, reach: Reach | None = None
    ) -> None:
        """`connections`: to other ranks; they are closed here. `reach`: connects with more ranks; None: all are there."""
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout.total_seconds()
        self._peers: dict[int, _Peer] = {}
        self._by_number: dict[int, _Peer] = {}
        self._reach, self._is_shut = reach, False
        self._poll = select.poll()
        self._collectives = 0
        self._moved = 0
        """Bytes, in both directions."""
        self._add(connections)
        close_in_child(self)

    def _add(self, connections: Mapping[int, Connected]) -> None:
        made = [_Peer(peer, connection) for peer, connection in connections.items()]
        self._by_number |= {peer.number: peer for peer in made}
        self._peers = self._peers | {peer.rank: peer for peer in made}  # another thread may look at the old one
        if self._is_shut:
            self.shut_down()

    def _connect(self, ranks: Iterable[int]) -> None:
        """Connect with those of these ranks that are not connected yet. Raises LinkError."""
        if self._reach is not None and (missing := [rank for rank in ranks if rank not in self._peers]):
            self._add(self._reach(missing))

    def _peer(self, rank: int) -> _Peer:
        self._connect([rank])
        return self._peers[rank]

    def name(self) -> str:
        return "messages"

    @property
    def connections(self) -> int:
        """How many ranks this one is connected with."""
        return len(self._peers)

    # ---- point to point

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> _Sending:
        tensor = tensors[0].detach().cpu().contiguous()
        return self._send(to, tag, bytes_in(tensor), tensor)

    def _send(self, to: int, tag: int, what: memoryview, owner: Any) -> _Sending:
        peer, sending = self._peer(to), _Sending(self, to, tag, what, owner)
        peer.sending.append(sending)
        self._push(peer)
        return sending

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Receiving:
        return self._receive(source, tag, tensors[0].detach())

    def send_bytes(self, what: bytes, to: int, tag: int) -> _Sending:
        return self._send(to, tag, memoryview(what), what)

    def receive_bytes(self, source: int, tag: int) -> _Receiving:
        return self._receive(source, tag, None)

    def _receive(self, source: int, tag: int, into: torch.Tensor | None) -> _Receiving:
        peer, receiving = self._peer(source), _Receiving(self, source, tag, into)
        if early := peer.early.get(tag):
            came = early.popleft()
            receiving.begin(len(came.bytes))
            receiving.bytes[: came.at], receiving.at = came.bytes[: came.at], came.at
            if came.is_done:
                receiving.end()
            else:
                peer.receiving = receiving
            return receiving
        peer.expected[tag].append(weakref.ref(receiving))
        return receiving

    # ---- collectives

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, of any length, along the rounds of `merge_rounds`."""
        tag, known = self._next_tag(), [own]
        for sources, targets, _ in self._rounds():
            receives = [self._receive(rank, tag, None) for rank in sources if rank != self._rank]
            packed = b"".join(_OF_RANK.pack(len(each)) + each for each in known)
            self._wait_all([*receives, *(self._send(rank, tag, memoryview(packed), packed) for rank in targets)])
            arrived = iter([list(_unpacked(each.bytes)) for each in receives])
            parts = [known if rank == self._rank else next(arrived) for rank in sources]
            known = [each for part in parts for each in part]
        return known

    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> "_Done":
        rows = received.view(self._world_size, sent.numel())
        rows[self._rank].copy_(sent.reshape(-1))
        tag, start, end = self._next_tag(), self._rank, self._rank + 1
        for sources, targets, edges in self._rounds():
            parts = [(source, rows[first:last]) for source, (first, last) in zip(sources, pairwise(edges), strict=True)]
            receives = [self.recv([part], source, tag) for source, part in parts if source != self._rank]
            self._wait_all([*receives, *(self.send([rows[start:end]], rank, tag) for rank in targets)])
            start, end = edges[0], edges[-1]
        return _DONE

    def broadcast(self, tensors: Sequence[torch.Tensor], options: dist.BroadcastOptions) -> "_Done":
        """Copy the root's tensors to all ranks, in place, one after another. Their sizes are the same on all ranks, and strides
        need not be."""
        root = int(options.rootRank)
        place, tag = (self._rank - root) % self._world_size, self._next_tag()
        way = _chain if _is_chained(sum(each.nbytes for each in tensors), self._world_size) else _tree
        source, targets = way(place, self._world_size)
        flats = [each.detach().contiguous().reshape(-1) for each in tensors]
        pieces = [piece for flat in flats for piece in flat.split(max(1, _PIECE_BYTES // flat.element_size()))]
        receives = [self.recv([each], (root + source) % self._world_size, tag) for each in pieces] if source is not None else []
        sends: list[_Moving] = []
        for at, each in enumerate(pieces):
            self._wait_all(receives[at : at + 1])
            sends += [self.send([each], (root + to) % self._world_size, tag) for to in targets]
        self._wait_all(sends)
        for tensor, flat in zip(tensors, flats, strict=True):
            if receives and not tensor.is_contiguous():
                tensor.detach().copy_(flat.view(tensor.shape))
        return _DONE

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> "_Done":
        tensor = tensors[0].detach()
        _, reduce = REDUCTIONS[reduction(options.reduceOp)]
        flat = tensor.reshape(-1).cpu()
        if self._world_size > 1 and flat.numel():
            direct = flat.nbytes * self._world_size <= _DIRECT_BYTES
            (self._reduce_directly if direct else self._reduce_around_ring)(flat, reduce)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return _DONE

    def _reduce_directly(self, flat: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> None:
        rows = flat.new_empty(self._world_size, flat.numel())
        self._allgather_base(rows, flat)
        if (of_rows := _OF_ROWS.get(reduce)) is not None:
            of_rows(rows, 0, out=flat)
            return
        flat.copy_(rows[0])
        for row in rows[1:]:  # in rank order, so that all ranks get the same bits
            reduce(flat, row, out=flat)

    def _reduce_around_ring(self, flat: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> None:
        n, rank = self._world_size, self._rank
        bounds = [flat.numel() * at // n for at in range(n + 1)]
        parts = [flat[start:end] for start, end in pairwise(bounds)]
        after, before = (rank + 1) % n, (rank - 1) % n
        came = torch.empty_like(max(parts, key=len))
        for step in range(n - 1):
            part = parts[(rank - step - 1) % n]
            self._pass_on(parts[(rank - step) % n], after, came[: len(part)], before)
            reduce(part, came[: len(part)], out=part)
        for step in range(n - 1):
            self._pass_on(parts[(rank - step + 1) % n], after, parts[(rank - step) % n], before)

    def _pass_on(self, sent: torch.Tensor, after: int, into: torch.Tensor, before: int) -> None:
        tag = self._next_tag()
        self._wait_all([self.recv([into], before, tag), self.send([sent], after, tag)])

    def _rounds(self) -> Sequence[MergeRound]:
        """The rounds in which all ranks get what each has, with connections for them."""
        self._connect(sorted(merge_peers(self._rank, self._world_size)))
        return merge_rounds(self._rank, self._world_size)

    def _next_tag(self) -> int:
        self._collectives += 1
        return _COLLECTIVE_TAGS + self._collectives

    def _wait_all(self, moving: Iterable[_Moving]) -> None:
        for each in moving:
            try:
                self.wait(each, None)
            except LinkError:
                raise
            except Exception as error:
                raise LinkError(each.rank, error) from error

    # ---- moving bytes

    def wait(self, moving: _Moving, timeout: timedelta | None) -> None:
        """Move bytes to and from all ranks until this message is done."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until, peer = time.monotonic() + seconds, self._peers[moving.rank]
        if not moving.is_done and isinstance(moving, _Receiving):
            self._pull(peer)
        while not moving.is_done:
            if peer.error is not None:
                raise _error_of(peer.rank, peer.error) from peer.error
            for each in self._peers.values():
                self._watch(each)
            left, before = until - time.monotonic(), self._moved
            for number, event in self._poll.poll(max(0, min(_MOST_MS, int(1e3 * left) + 1))):
                if event & select.POLLNVAL:
                    self._by_number[number].error = OSError(errno.EBADF, os.strerror(errno.EBADF))
                if event & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                    self._push(self._by_number[number])
                if event & (select.POLLIN | select.POLLERR | select.POLLHUP):
                    self._pull(self._by_number[number])
            if left <= 0 and self._moved == before and peer.error is None:
                raise TimeoutError(f"Timed out waiting {seconds:.0f} s for rank {moving.rank}{_came_instead(peer, moving)}")
        if isinstance(moving, _Receiving) and moving.problem is not None:
            raise moving.problem

    def _watch(self, peer: _Peer) -> None:
        """Poll for what this connection can do."""
        events = 0
        if peer.error is None:
            reads = peer.receiving is not None or any(peer.expected.values())
            events = (select.POLLIN if reads else 0) | (select.POLLOUT if peer.sending else 0)
        if events != peer.watched:
            if events:
                self._poll.register(peer.number, events)
            else:
                self._poll.unregister(peer.number)
            peer.watched = events

    def _push(self, peer: _Peer) -> None:
        """Send as much as there is room for."""
        try:
            while peer.sending and peer.error is None:
                first = peer.sending[0]
                sent = peer.connection.sendmsg(first.parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._moved += sent
                while first.parts and sent >= len(first.parts[0]):
                    sent -= len(first.parts.pop(0))
                if first.parts:
                    first.parts[0] = first.parts[0][sent:]
                    continue
                first.is_done = True
                peer.sending.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            peer.error = _never_raised(error)

    def _pull(self, peer: _Peer) -> None:
        """Take what has come."""
        try:
            while peer.error is None and (peer.receiving is not None or any(peer.expected.values())):
                if peer.receiving is None:
                    peer.header += self._came(peer.connection.recv(_HEADER.size - len(peer.header), socket.MSG_DONTWAIT))
                    if len(peer.header) == _HEADER.size:
                        self._begin(peer)
                    continue
                taking = peer.receiving
                taking.at += len(self._came(range(peer.connection.recv_into(taking.bytes[taking.at :], 0, socket.MSG_DONTWAIT))))
                if taking.at == len(taking.bytes):
                    self._end(peer, taking)
        except BlockingIOError:
            pass
        except OSError as error:
            peer.error = _never_raised(error)

    def _came(self, what: Any) -> Any:
        """Return `what`. Raises ConnectionResetError if it is empty: the connection has ended."""
        if not len(what):
            raise ConnectionResetError("Connection closed by peer")
        self._moved += len(what)
        return what

    def _begin(self, peer: _Peer) -> None:
        """A header has come."""
        count, peer.tag = _HEADER.unpack(peer.header)
        peer.header.clear()
        waiting = peer.expected[peer.tag]
        receiving = None
        while waiting and receiving is None:
            receiving = waiting.popleft()()
        if not waiting:
            del peer.expected[peer.tag]
        if receiving is None:
            receiving = _Receiving(self, peer.rank, peer.tag, None)
            peer.early[peer.tag].append(receiving)
        receiving.begin(count)
        peer.receiving = receiving
        if not count:
            self._end(peer, receiving)

    @staticmethod
    def _end(peer: _Peer, receiving: _Receiving) -> None:
        receiving.end()
        peer.receiving = None

    # ---- ends

    def has_lost_a_rank(self) -> bool:
        ends = select.poll()
        for peer in self._peers.values():
            ends.register(peer.number, select.POLLRDHUP)
        return bool(ends.poll(0))

    def shut_down(self) -> None:
        self._is_shut = True
        for peer in self._peers.values():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()

    close_copies = close


def _unpacked(packed: memoryview) -> Iterator[bytes]:
    """The bytes of each rank in what another one has gathered."""
    at = 0
    while at < len(packed):
        (count,) = _OF_RANK.unpack_from(packed, at)
        at += _OF_RANK.size + count
        yield bytes(packed[at - count : at])


def _came_instead(peer: _Peer, moving: _Moving) -> str:
    """Words that name the message that came where another one was awaited. Empty if none came."""
    early = [tag for tag, came in peer.early.items() if came]
    if not early or not isinstance(moving, _Receiving):
        return ""
    return f": a message with tag {min(early)} came where one with tag {moving.tag} was expected"


def _never_raised(error: OSError) -> OSError:
    """A copy without a traceback, whose frames would keep all that the lane's job uses as long as the lane's thread lives."""
    return TlsError(*error.args) if isinstance(error, TlsError) else OSError(*error.args)


def _error_of(rank: int, error: OSError) -> Exception:
    """The error to raise where the connection with that rank has this one."""
    if isinstance(error, TlsError) and "alert" not in str(error):  # an alert comes from the other rank
        return DamagedError(rank, error)
    if error.errno is None:
        return ConnectionError(str(error))
    return ConnectionError(error.errno, str(error.strerror or error))


class _Done:
    """A transfer that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


_DONE = _Done()


def bytes_in(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied. The caller keeps the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _tree(place: int, ranks: int) -> tuple[int | None, list[int]]:
    """The source of a message in a binomial tree for the rank at this place, and its targets, the largest subtree first.

    >>> [_tree(place, 6) for place in range(6)]
    [(None, [4, 2, 1]), (0, []), (0, [3]), (2, []), (0, [5]), (4, [])]
    """
    low = place & -place if place else 1 << max(0, (ranks - 1).bit_length())
    steps = [1 << bit for bit in reversed(range(low.bit_length() - 1))]
    return (place - low if place else None), [place + step for step in steps if place + step < ranks]


def _is_chained(nbytes: int, ranks: int) -> bool:
    """Whether a broadcast passes from rank to rank. The last rank has it after the time of pieces + ranks sends then, and along
    the tree after that of pieces x log2(ranks), since the root sends each piece so many times.

    >>> [_is_chained(nbytes, ranks=64) for nbytes in (2**20, 2**22)], _is_chained(2**24, ranks=1024)
    ([False, True], False)
    """
    return nbytes >= _CHAIN_BYTES and nbytes * ((ranks - 1).bit_length() - 1) >= _PIECE_BYTES * ranks


def _chain(place: int, ranks: int) -> tuple[int | None, list[int]]:
    """The source and the target where a message passes from rank to rank.

    >>> [_chain(place, 3) for place in range(3)]
    [(None, [1]), (0, [2]), (1, [])]
    """
    return (place - 1 if place else None), [place + 1] if place + 1 < ranks else []
