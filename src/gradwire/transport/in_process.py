"""Ranks that are threads of one process: for tests, without processes, sockets or torch.distributed.

`run_ranks` starts the threads and gives each a group, which `gw.Exchange` and `gw.parallelize` take as `process_group`. Links of
such a group copy tensors from one thread to another. Sums are made in rank order. There are no wires, no shared memory and no
heartbeats. The random state of torch is one for all ranks: draw from a generator of each rank's own.
"""

import secrets
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from gradwire.transport.adapters import adapter_gbps
from gradwire.transport.grid import Grid
from gradwire.transport.keys import KEY_BYTES, JobKey
from gradwire.transport.link import Backend, Group
from gradwire.transport.messages import REDUCTIONS, Ends, reduction
from gradwire.transport.rendezvous import GroupMeeting
from gradwire.transport.wire import transfer

__all__ = ["InProcessGroup", "run_ranks"]

T = TypeVar("T")

_LOOK_S = 0.1
"""How often those who wait look whether a rank has closed its end."""
_AFTER_S = 5.0
"""How long threads may take to end after their waits were made to fail."""


def run_ranks(
    world_size: int, function: Callable[..., T], *arguments: Any, timeout_s: float = 60.0, nodes: Sequence[str] | None = None
) -> list[T]:
    """Run `function(group, *arguments)` in a thread for each rank. Return what each returned, in rank order.

    timeout_s: how long a wait for another rank, and all ranks together, may take.
    nodes: the name of each rank's node; None: all are on one.

    When a rank raises, waits of the others for it fail. The first error is raised again, with a note that names the rank. Raises
    TimeoutError, with the place of each rank that has not ended, when the time is over.

    Example::

        def mean(group):
            values = torch.full((4,), float(group.rank))
            exchange = gw.Exchange({"values": values}, plan=gw.Identity(), process_group=group)
            exchange.average_()
            exchange.close()
            return values.tolist()

        assert run_ranks(3, mean) == [[1.0] * 4] * 3
    """
    names = ["node"] * world_size if nodes is None else list(nodes)
    if len(names) != world_size:
        raise ValueError(f"nodes names the nodes of {len(names)} ranks, and there are {world_size}. Name one for each rank.")
    shared = _Shared(world_size, timeout_s)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def live(rank: int) -> None:
        try:
            results[rank] = function(shared.group(rank, names[rank]), *arguments)
        except BaseException as error:
            errors.append((rank, error))
        finally:
            shared.end(rank)

    threads = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout_s + _AFTER_S  # the waits of ranks end first, with errors that say more
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    places = {thread.name: _place(thread) for thread in threads if thread.is_alive()}
    if places:
        shared.break_off()
        for thread in threads:
            thread.join(_AFTER_S)
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    if places:
        where = "\n".join(f"{name} is here:\n{place}" for name, place in places.items())
        raise TimeoutError(f"{len(places)} of {world_size} ranks did not end within {timeout_s} s.\n{where}")
    return [results[rank] for rank in range(world_size)]


def _place(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-5:]) if frame is not None else "it has just ended"


@dataclass(frozen=True)
class InProcessGroup(Group):
    """The ranks of `run_ranks`, seen from one of them."""

    shared: "_Shared"
    """The state that all ranks use."""
    node: str
    """The name of this rank's node."""

    @property
    def has_wires(self) -> bool:
        return False

    def meet(self, timeout: timedelta | None = None, meshes: Sequence[str] = ()) -> Self:
        with transfer():
            drawn = self.gather((self.node, adapter_gbps(), secrets.token_hex(8), secrets.token_bytes(KEY_BYTES)))
        nodes, gbps, names, secret = zip(*drawn, strict=True)
        return self._met(GroupMeeting(names[0], JobKey(secret[0]), nodes, gbps))

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, in rank order, not copied. Collective."""
        met = self.shared.hub("").meet(self.rank, "gather", value, list)
        met.wait(self.timeout)
        return list(met.result)

    def store(self, name: str) -> Any:
        return _MemoryStore(self.shared, f"gradwire/{name}/")

    def machine_name(self) -> str:
        return self.node

    def connect(self, name: str, device: torch.device, timeout: timedelta) -> tuple[Backend, Ends]:
        backend = _HubBackend(self.shared.hub(f"{self.met.name}/{name}"), self.rank)
        return backend, backend


class _Shared:
    """The state that the ranks of one call of `run_ranks` share."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.values: dict[str, bytes] = {}
        """The values of the store."""
        self.ended: set[int] = set()
        self._hubs: dict[str, _Hub] = {}
        self._lock = threading.Lock()

    def group(self, rank: int, node: str) -> InProcessGroup:
        nobody: Any = None
        everybody, timeout = tuple(range(self.world_size)), timedelta(seconds=self.timeout_s)
        return InProcessGroup(nobody, rank, everybody, timeout, Grid.even(1, self.world_size, rank), self, node)

    def hub(self, name: str) -> "_Hub":
        """The hub of the link of this name. Whoever comes first makes it."""
        with self._lock:
            return self._hubs.setdefault(name, _Hub(self))

    def end(self, rank: int) -> None:
        """A rank runs no more: waits for it fail."""
        self.ended.add(rank)
        for hub in self._all():
            hub.wake()

    def break_off(self) -> None:
        """All waits fail."""
        for hub in self._all():
            hub.shut_down()

    def _all(self) -> "list[_Hub]":
        with self._lock:
            return list(self._hubs.values())


class _MemoryStore:
    """The part of torch's stores that a group uses, on a dictionary."""

    _APPENDS = threading.Lock()

    def __init__(self, shared: _Shared, prefix: str) -> None:
        self._values, self._prefix = shared.values, prefix

    def clone(self) -> "_MemoryStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._values[self._prefix + key] = value.encode() if isinstance(value, str) else value

    def append(self, key: str, value: str) -> None:
        with self._APPENDS:
            self._values[self._prefix + key] = self._values.get(self._prefix + key, b"") + value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(self._prefix + key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._values[self._prefix + key]


class _HubTransfer:
    """A transfer under way, on one rank or on all."""

    result: Any = None

    def __init__(self, hub: "_Hub") -> None:
        self._hub = hub
        self.is_done = False
        self.error: Exception | None = None

    def waits_for(self) -> list[int]:
        """The ranks that have not done their part."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done. Raises ConnectionError where a rank has left, TimeoutError."""
        seconds = self._hub.shared.timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        with self._hub.changed:
            while not self.is_done:
                missing = self.waits_for()
                self._hub.check(missing)
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError(f"nothing came from {_named(missing)} within {seconds} s")
                self._hub.changed.wait(min(left, _LOOK_S))
        if self.error is not None:
            raise self.error
        return True


class _Sent(_HubTransfer):
    """A message that was copied when it was sent."""

    def __init__(self, hub: "_Hub") -> None:
        super().__init__(hub)
        self.is_done = True


class _Receive(_HubTransfer):
    """A tensor, or bytes of any length, that wait for a message."""

    def __init__(self, hub: "_Hub", into: torch.Tensor | None, source: int) -> None:
        super().__init__(hub)
        self._into, self._source = into, source
        self.bytes = memoryview(b"")
        """The bytes that came, where there is no tensor for them."""

    def waits_for(self) -> list[int]:
        return [self._source]

    def take(self, message: torch.Tensor) -> None:
        """The message is there."""
        self.is_done = True
        if self._into is None:
            self.bytes = memoryview(bytes(message.tolist()))
        elif self._into.nbytes == message.nbytes:
            _bytes(self._into).copy_(_bytes(message))
        else:
            words = f"rank {self._source} sent {message.nbytes} bytes, and {self._into.nbytes} bytes are received"
            self.error = ValueError(words)


class _HubCollective(_HubTransfer):
    """A collective, which the rank that comes last does for all."""

    def __init__(self, hub: "_Hub", what: str) -> None:
        super().__init__(hub)
        self._what = what
        self._parts: dict[int, Any] = {}

    def waits_for(self) -> list[int]:
        return [rank for rank in range(self._hub.shared.world_size) if rank not in self._parts]

    def join(self, rank: int, what: str, part: Any, do: Callable[[list[Any]], Any]) -> None:
        """A rank does its part. `do`: makes the result of all parts, in rank order."""
        self._parts[rank] = part
        if what != self._what:
            self.error = ValueError(f"rank {rank} called {what} where another rank called {self._what}")
        if not self.waits_for():
            try:
                self.result = do([self._parts[other] for other in sorted(self._parts)]) if self.error is None else None
            except Exception as error:
                self.error = error
            self.is_done = True


class _Hub:
    """The messages of one link between all ranks."""

    def __init__(self, shared: _Shared) -> None:
        self.shared, self.changed = shared, threading.Condition()
        self._unread: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        """Messages by source, target and tag."""
        self._receives: defaultdict[tuple[int, int, int], deque[weakref.ref[_Receive]]] = defaultdict(deque)
        """Receives that wait. A receive that was dropped takes no message."""
        self._meetings: dict[int, _HubCollective] = {}
        self._met = [0] * shared.world_size
        """How many collectives each rank has called."""
        self._closed: set[int] = set()
        self._is_shut = False

    def shut_down(self) -> None:
        """Fail all waits, on all ranks."""
        with self.changed:
            self._is_shut = True
            self.changed.notify_all()

    def wake(self) -> None:
        """Let those who wait see who is left."""
        with self.changed:
            self.changed.notify_all()

    def close(self, rank: int) -> None:
        """A rank closed its end. Takes no lock, since the garbage collector may call it anywhere: those who wait look by
        themselves."""
        self._closed.add(rank)

    def has_lost_a_rank(self) -> bool:
        """Whether a rank has left the link."""
        return bool(self._closed or self.shared.ended)

    def check(self, ranks: list[int]) -> None:
        """Raises ConnectionError where the link was broken off, or one of these ranks has left it."""
        if self._is_shut:
            raise ConnectionError("the link was broken off")
        if gone := [rank for rank in ranks if rank in self._closed or rank in self.shared.ended]:
            raise ConnectionError(f"{_named(gone)} ended")

    def send(self, source: int, to: int, tag: int, message: torch.Tensor) -> _HubTransfer:
        key = source, to, tag
        with self.changed:
            self.check([to])
            while self._receives[key]:
                if (receive := self._receives[key].popleft()()) is not None:
                    receive.take(message)
                    self.changed.notify_all()
                    return _Sent(self)
            self._unread[key].append(message.clone())
            return _Sent(self)

    def receive(self, source: int, to: int, tag: int, into: torch.Tensor | None) -> _Receive:
        key, made = (source, to, tag), _Receive(self, into, source)
        with self.changed:
            if self._unread[key]:
                made.take(self._unread[key].popleft())
            else:
                self._receives[key].append(weakref.ref(made))
        return made

    def meet(self, rank: int, what: str, part: Any, do: Callable[[list[Any]], Any]) -> _HubTransfer:
        """All ranks call a collective: the same one, in the same order."""
        with self.changed:
            self.check([])
            number = self._met[rank]
            self._met[rank] += 1
            meeting = self._meetings.setdefault(number, _HubCollective(self, what))
            meeting.join(rank, what, part, do)
            if meeting.is_done:
                del self._meetings[number]
                self.changed.notify_all()
        return meeting


class _HubBackend(Ends):
    """One rank's end of a link."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._finalizer = weakref.finalize(self, hub.close, rank)

    def has_lost_a_rank(self) -> bool:
        return self._hub.has_lost_a_rank()

    def shut_down(self) -> None:
        self._hub.shut_down()

    def close(self) -> None:
        self._finalizer()

    def name(self) -> str:
        return "in process"

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _HubTransfer:
        return self._hub.send(self._rank, to, tag, tensors[0])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _HubTransfer:
        return self._hub.receive(source, self._rank, tag, tensors[0])

    def send_bytes(self, what: bytes, to: int, tag: int) -> _HubTransfer:
        return self._hub.send(self._rank, to, tag, torch.frombuffer(bytearray(what), dtype=torch.uint8))

    def receive_bytes(self, source: int, tag: int) -> "_Receive":
        return self._hub.receive(source, self._rank, tag, None)

    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> _HubTransfer:
        return self._hub.meet(self._rank, "all_gather", (received, sent), _gather)

    def gather(self, own: bytes) -> list[bytes]:
        met = self._hub.meet(self._rank, "gather of bytes", own, list)
        met.wait()
        return list(met.result)

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> _HubTransfer:
        op = reduction(options.reduceOp)
        return self._hub.meet(self._rank, f"all_reduce ({op})", tensors[0], partial(_reduce, REDUCTIONS[op][1]))

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> _HubTransfer:
        root = int(options.rootRank)
        return self._hub.meet(self._rank, f"broadcast from rank {root}", tensors[0], partial(_broadcast, root))


def _gather(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    everything = torch.cat([sent.reshape(-1) for _, sent in parts])
    for received, _ in parts:
        received.view(-1).copy_(everything)


def _reduce(op: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    total = tensors[0].clone()
    for each in tensors[1:]:
        op(total, each, out=total)
    for each in tensors:
        each.copy_(total)


def _broadcast(root: int, tensors: list[torch.Tensor]) -> None:
    for rank, each in enumerate(tensors):
        if rank != root:
            each.copy_(tensors[root])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
