"""Links: private communicators in addition to the caller's process group, each used by one thread.

A link is a separate backend object (`Messages` on CPU, NCCL on CUDA) over the caller's ranks, under a name that rank 0 chose.
Links are not registered with torch.distributed: `new_group` names groups by their number in a process, so ranks of different
sub-groups could connect to wrong ranks or wait for each other forever. The group makes the backend (`Group.connect`): a group of
another kind may bring another backend, as `gradwire.transport.in_process` does.
"""

import ctypes
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.core import show
from gradwire.errors import PlanError, StepStateError
from gradwire.kernels import crc32c
from gradwire.transport.grid import Grid, machine_name
from gradwire.transport.keys import KEY_BYTES, JobKey
from gradwire.transport.messages import Ends, Messages
from gradwire.transport.pinned import PinnedRing
from gradwire.transport.queued import COMPLETE, QueuedStep
from gradwire.transport.rendezvous import GroupMeeting, Rendezvous
from gradwire.transport.store_waits import Check, await_keys
from gradwire.transport.streams import streams_for
from gradwire.transport.tls import TlsOption
from gradwire.transport.wire import DamagedError, LinkError, Wire, transfer

_NAME_BYTES = 8
_CHECK_TAGS = 2**32
"""The first tag of checksums."""
_NCCL_TIMEOUTS = 3
"""NCCL's timeout in timeouts of other links. NCCL's clock starts when an operation is queued. Other links must find a failure
first, since they know the rank and the bucket."""
_NCCL_ERRORS, _ABORT_COMMUNICATOR = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
"""The variable that says what NCCL's watchdog does after an error, and the value with which it ends no process."""
_nccl_errors = threading.Lock()


@contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """NCCL communicators that are made inside abort themselves after an error. By default torch ends the process."""
    with _nccl_errors:
        before = os.environ.get(_NCCL_ERRORS)
        os.environ[_NCCL_ERRORS] = _ABORT_COMMUNICATOR
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NCCL_ERRORS]
            else:
                os.environ[_NCCL_ERRORS] = before


class Pending(Protocol):
    """A transfer that a backend has begun."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait until it is done. Raises an error if it failed."""
        ...


class PendingBytes(Pending, Protocol):
    """Bytes that a backend has begun to receive."""

    bytes: memoryview
    """The bytes that came; all of them after `wait`."""


class Backend(Protocol):
    """Carries the messages of one link: `Messages`, NCCL, or the memory that threads of one process share."""

    def name(self) -> str:
        """The name of the backend; NCCL's exchanges are grouped."""
        ...

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        """Send one tensor to a rank."""
        ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        """Receive one tensor from a rank. Tensors of one tag arrive in the order in which they were sent."""
        ...

    def send_bytes(self, what: bytes, to: int, tag: int) -> Pending:
        """Send bytes to a rank. For short ones, tensors take more time than the message. Not on CUDA."""
        ...

    def receive_bytes(self, source: int, tag: int) -> PendingBytes:
        """Receive bytes of any length from a rank. Not on CUDA."""
        ...

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, of any length. Not on CUDA."""
        ...

    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> Pending: ...

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Pending:
        """Reduce one tensor over all ranks, in place."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Pending:
        """Copy the root's tensor to all ranks, in place."""
        ...


@dataclass(frozen=True)
class Group:
    """The ranks that synchronise: the caller's process group, or the processes that share a store, seen from one rank."""

    process_group: Any
    """The `dist.ProcessGroup`; None where ranks have nothing in common but a store."""
    rank: int
    """Within the group, as everywhere in gradwire except in messages."""
    global_ranks: tuple[int, ...]
    timeout: timedelta
    grid: Grid
    """The ranks by node; a single node until ranks have met."""
    meeting: GroupMeeting | None = field(default=None, kw_only=True)
    """None until ranks have met."""
    tls: TlsOption = field(default=None, kw_only=True)
    """Whether connections between ranks are encrypted."""
    own_store: Any = field(default=None, kw_only=True)
    """A connection of its own to the rendezvous store, for a thread that connects while others do. None: the process's."""
    check: Check | None = field(default=None, kw_only=True)
    """Called while ranks wait for each other to connect; None: nobody knows which ranks are gone."""

    @staticmethod
    def of_store(store: Any, rank: int, size: int, timeout: timedelta, check: Check | None = None) -> "Group":
        """A group of `size` processes that need no torch.distributed: they reach the same store, and each has another rank.

        store: with a prefix of this group's own, which no earlier group used. Rank 0 puts the group's name and key there, so
        whoever reads the store can pretend to be a rank: keep the store inside the job's network.
        check: called while ranks wait for each other to connect; it raises LinkError where one of them is gone.
        """
        return Group(None, rank, tuple(range(size)), timeout, Grid.even(1, size, rank), own_store=store, check=check)

    @staticmethod
    def of(process_group: dist.ProcessGroup | None) -> "Group":
        """The caller's group, or all ranks. Raises StepStateError without torch.distributed, PlanError on a rank that is not in
        the group, and for what is no group of this process."""
        if not dist.is_initialized():
            raise StepStateError(
                "torch.distributed is not initialised, so there are no ranks to synchronise. Call "
                'torch.distributed.init_process_group("gloo") first and start the script with torchrun.'
            )
        if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise PlanError("this rank is not in the process_group it passed. Call it only on the group's ranks.")
        pg = process_group if process_group is not None else distributed_c10d._get_default_group()
        ranks = tuple(distributed_c10d._world.pg_group_ranks.get(pg, ()) if isinstance(pg, dist.ProcessGroup) else ())
        if not ranks:
            raise PlanError(
                f"process_group is {show(process_group)}, which is no group of ranks of this process. Pass what "
                "torch.distributed.new_group returned, or leave it out for all ranks."
            )
        return Group(pg, dist.get_rank(pg), ranks, _timeout_of(pg), Grid.even(1, len(ranks), dist.get_rank(pg)))

    @property
    def world_size(self) -> int:
        return len(self.global_ranks)

    @property
    def has_wires(self) -> bool:
        """Whether ranks of this kind of group have connections on which C++ can run phases."""
        return self.world_size > 1

    def meet(self, timeout: timedelta | None = None, meshes: Sequence[str] = ()) -> Self:
        """This group after its ranks have met: they know each other's nodes and addresses, and are connected by the meshes of
        these names. Collective. timeout: None for the group's. Raises LinkError, and what `Rendezvous` raises on all ranks."""
        with transfer():
            drawn = self._from_rank_0(secrets.token_bytes(_NAME_BYTES + KEY_BYTES))
        return self._meet(drawn[:_NAME_BYTES].hex(), JobKey(drawn[_NAME_BYTES:]), timeout or self.timeout, meshes)

    def meet_apart(self, name: str, timeout: timedelta, meshes: Sequence[str] = ()) -> Self:
        """This group after its ranks have met once more, under a name of their own. Collective, but several threads may do so at
        once: nothing passes on the caller's group, and the store has a connection of its own, since a thread that waits for a key
        keeps others from the store. Raises what `meet` raises."""
        store: Any = self.own_store or distributed_c10d._get_default_store()
        with transfer():
            apart = replace(self, own_store=store.clone())
        return apart._meet(name, self.met.key.derived(name), timeout, meshes)

    def _meet(self, name: str, key: JobKey, timeout: timedelta, meshes: Sequence[str]) -> Self:
        place = self.rank, self.world_size, self.store(name), self.machine_name()
        return self._met(Rendezvous(name, key, *place, timeout, meshes, self.tls, self.check))

    def _met(self, meeting: GroupMeeting) -> Self:
        return replace(self, meeting=meeting, grid=Grid.of(meeting.nodes, self.rank))

    def _from_rank_0(self, own: bytes) -> bytes:
        """Rank 0's bytes, as many from each, on the caller's own group or through its store. Collective."""
        if self.process_group is None:
            place = self.store("begin")
            if self.rank == 0:
                place.set("name and key", own.hex())
            await_keys(place, ["name and key"], self.timeout, self.check)
            return bytes.fromhex(place.get("name and key").decode())
        device = "cpu" if _handles_cpu(self.process_group) else torch.device("cuda", torch.cuda.current_device())
        drawn = torch.tensor(list(own), dtype=torch.uint8, device=device)
        dist.broadcast(drawn, self.global_ranks[0], group=self.process_group)
        return bytes(drawn.tolist())

    @property
    def met(self) -> GroupMeeting:
        """The meeting. Raises RuntimeError before `meet`."""
        if self.meeting is None:
            raise RuntimeError("ranks of this group have not met: call group.meet(timeout) on all of them")
        return self.meeting

    def store(self, name: str) -> Any:
        """The rendezvous store with the prefix gradwire/name."""
        return distributed_c10d.PrefixStore(f"gradwire/{name}", self.own_store or distributed_c10d._get_default_store())

    def machine_name(self) -> str:
        """The name of the machine of this rank."""
        return machine_name()

    def stages(self, device: torch.device) -> bool:
        """Whether tensors of this device travel through the host's memory: no NCCL of the caller's group is there for them."""
        pg = self.process_group
        return device.type == "cuda" and (pg is None or pg._get_backend(device).name() != "nccl")

    def connect(self, name: str, device: torch.device, timeout: timedelta) -> tuple[Any, Ends]:
        """The backend of a link of this name, for tensors of this device, and its connections. Collective, after `meet`."""
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NCCL_TIMEOUTS * timeout
            store = self.store(f"{self.met.name}/{name}")
            with transfer(), _errors_end_no_process():
                backend = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
                backend.eager_connect_single_device(
                    device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
                )
            return backend, Ends()
        reach = partial(self.met.reach, name)
        messages = Messages(self.met.mesh(name), self.rank, self.world_size, timeout, reach)
        return messages, messages


class Unfinished(Protocol):
    """Messages whose sends may be under way."""

    def finish(self) -> None:
        """Wait until the sent tensors may be overwritten."""
        ...


class Link:
    """Collectives over a group's ranks, submitted by one thread. Each returns at once; `Work.wait()` blocks the thread on CPU and
    the current stream on CUDA."""

    def __init__(self, group: Group, name: str, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.world_size, self.timeout = group.rank, group.world_size, timeout
        self.streams = streams_for(device)
        self.wire: Wire | None = None
        """The wire on which C++ runs phases, if all ranks can."""
        self.pinned: PinnedRing | None = None
        """The host's memory through which tensors of a device travel; None where tensors travel as they are."""
        self._unfinished: Unfinished | None = None
        self._broken = False
        self.backend: Any  # a Backend; NCCL's has more
        self._meeting = group.met
        self.backend, self._ends = group.connect(name, device, timeout)

    def expect(self, tag: int, received: Sequence[torch.Tensor], checked: bool = True) -> "AllToAll":
        """Announce an exchange; rank j's part arrives in `received[j]`. Call `AllToAll.send` when the own parts are ready. What
        arrives before its exchange was announced is copied once more.

        `checked`: on the CPU a checksum follows each part, and `wait` compares it. Tags are below 2**32.
        """
        if self.backend.name() == "nccl":
            return _Grouped(self, tag, received)
        return (_Checked if checked and all(part.is_cpu for part in received) else AllToAll)(self, tag, received)

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order. Not on CUDA. Raises LinkError."""
        with transfer():
            gathered: list[bytes] = self.backend.gather(own)
        return gathered

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Gather the tensor `sent` of all ranks, in rank order, in `received`. All have one size."""
        work: Pending = self.backend._allgather_base(received, sent)
        return work

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Sum (or `op`) over ranks, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: Pending = self.backend.allreduce([tensor], options)
        return work

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        """Copy the root's values to all ranks, in place. `root` is a rank of the group."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work: Pending = self.backend.broadcast([tensor], options)
        return work

    @property
    def takes_parts(self) -> bool:
        """Whether there is `broadcast_parts`: tensors lie on the CPU, and the backend takes several."""
        return isinstance(self.backend, Messages) and self.pinned is None

    def broadcast_parts(self, parts: Sequence[torch.Tensor], root: int) -> None:
        """Copy the root's values of these tensors to all ranks, in place. Sizes are the same on all ranks, strides need not be.
        Raises LinkError."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        with transfer():
            self.backend.broadcast(parts, options)

    def finish_later(self, exchange: "Unfinished") -> None:
        """Do not wait for the sends of an exchange whose receivers answer in the next one: this keeps what is sent until then."""
        self._unfinished = exchange

    @property
    def connections(self) -> int:
        """The number of ranks that this one is connected with, by wire or else. 0 if the backend hides it."""
        others: int = getattr(self.backend, "connections", 0)
        return max(others, 0 if self.wire is None else self.wire.connections)

    def close(self) -> None:
        """Close the connections, and free the backend before the interpreter exits."""
        if self._unfinished is not None and not self._broken:
            with suppress(LinkError):  # other ranks are gone
                self._unfinished.finish()
        self._unfinished = None
        completed = not self._broken and self.backend.name() == "nccl" and self._has_completed()
        backend = self.__dict__.pop("backend")  # nobody aborts it from now on
        if completed:  # else its destructor aborts operations, which other ranks then miss
            with suppress(RuntimeError):  # NCCL found an error after all
                backend.shutdown()
        del backend
        self._ends.close()
        if self.wire is not None:
            self.wire.close()

    def _has_completed(self) -> bool:
        """Wait until the device has done what was queued on this link. Returns whether it did, without an error."""
        try:
            with self.streams.encoding(None):
                encoded = self.streams.mark()
            with self.streams.decoding():
                queued = QueuedStep(0, [(self, encoded), (self, self.streams.mark())], [], [])
            return queued.await_end(self.timeout.total_seconds(), self.has_lost_a_rank) == COMPLETE
        except RuntimeError:  # the device reports an error
            return False

    def break_off(self) -> None:
        """Fail all waits on this link, here and on the other ranks, at once. For any thread; the link is unusable afterwards."""
        self._broken = True
        backend = self.__dict__.get("backend")
        if backend is not None and backend.name() == "nccl":
            backend.abort()
        self._ends.shut_down()
        if self.wire is not None:
            self.wire.shut_down()
        self._meeting.break_off()

    def has_lost_a_rank(self) -> bool:
        """Whether another rank has closed its end. Not known on CUDA."""
        return self._ends.has_lost_a_rank()

    def has_failed(self) -> bool:
        """Whether an operation of the link failed on the device: NCCL found an error, or gave up."""
        backend = self.__dict__.get("backend")
        if self._broken or backend is None:  # None: it was closed
            return self._broken
        return bool(backend.name() == "nccl" and backend.get_error().name != "SUCCESS")

    def abandon(self) -> None:
        """Never destroy the backend: NCCL's destructor would wait for operations that cannot finish."""
        if (backend := self.__dict__.get("backend")) is not None:  # None: it was closed
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        if self.wire is not None:  # the thread may still touch memory that ranks share
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.wire))


class AllToAll:
    """Every rank sends a part to every other, point to point, receives posted first. Empty parts are not sent. All calls raise
    LinkError."""

    def __init__(self, link: Link, tag: int, received: Sequence[torch.Tensor]) -> None:
        self.link, self.tag, self.received = link, tag, received
        self._sends: dict[int, Pending] = {}
        self._receives: dict[int, Pending] = {}
        self.announce()

    def announce(self) -> None:
        """Post the receives."""
        for source, part in enumerate(self.received):
            if source != self.link.rank and part.numel():
                with transfer(source):
                    self._receives[source] = self.link.backend.recv([part], source, self.tag)

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        """Send `sent[j]` to rank j; the own part is not used."""
        # begin with the next rank, so that not all send to rank 0 first
        for step in range(1, self.link.world_size):
            to = (self.link.rank + step) % self.link.world_size
            if sent[to].numel():
                with transfer(to):
                    self._sends[to] = self.link.backend.send([sent[to]], to, self.tag)

    def wait(self, source: int) -> None:
        """Wait for the part of rank `source`. On CUDA the current stream waits, for the own part until the work queued before the
        exchange is done."""
        if source in self._receives:
            with transfer(source):
                self._receives[source].wait(self.link.timeout)

    def finish(self) -> None:
        """Wait until the sent tensors may be overwritten."""
        for to, send in self._sends.items():
            with transfer(to):
                send.wait(self.link.timeout)


class _Checked(AllToAll):
    """An exchange with a checksum behind each part."""

    def announce(self) -> None:
        super().announce()
        self._told = torch.zeros(len(self.received), dtype=torch.int64).split(1)
        self._checks = AllToAll(
            self.link,
            self.tag + _CHECK_TAGS,
            [told if source in self._receives else told[:0] for source, told in enumerate(self._told)],
        )

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        super().send(sent)
        sums = {id(part): torch.tensor([crc32c(part)]) for part in {id(sent[to]): sent[to] for to in self._sends}.values()}
        self._checks.send([sums.get(id(part), self._told[0][:0]) for part in sent])

    def wait(self, source: int) -> None:
        super().wait(source)
        self._checks.wait(source)
        if source in self._receives and (now := crc32c(self.received[source])) != (sent := int(self._told[source])):
            nbytes = self.received[source].nbytes
            words = f"the checksum of {nbytes} bytes was {sent:08x} before they were sent and is {now:08x} now"
            raise DamagedError(source, ValueError(words))

    def finish(self) -> None:
        super().finish()
        self._checks.finish()


class _Grouped(AllToAll):
    """One grouped call on CUDA."""

    def announce(self) -> None:
        pass

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        own = self.link.rank
        none = self.received[own][:0]
        outputs = [none if j == own else part for j, part in enumerate(self.received)]
        inputs = [none if j == own else part for j, part in enumerate(sent)]
        with transfer():
            self.work: Pending = self.link.backend.alltoall(outputs, inputs)

    def wait(self, source: int) -> None:
        with transfer():
            self.work.wait()

    def finish(self) -> None:
        pass


class SilentLink:
    """A link that sends nothing, to measure the codec work of a scheme alone."""

    streams = streams_for(torch.device("cpu"))
    wire = pinned = None

    def __init__(self, group: Group) -> None:
        self.rank, self.world_size = group.rank, group.world_size

    def expect(self, *arguments: object) -> "SilentLink":
        return self

    all_reduce = expect

    def send(self, *arguments: object) -> None:
        pass

    wait = finish = send


def _handles_cpu(pg: dist.ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in pg._device_types)


def _timeout_of(pg: dist.ProcessGroup) -> timedelta:
    device = torch.device("cpu") if _handles_cpu(pg) else torch.device("cuda")
    timeout = pg._get_backend(device).options._timeout
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout
