"""A double of a device's streams and events: operations run at once on CPU tensors, and any two that no wait orders are an error.

Each timeline (a stream, the communicator's stream, a thread of the host) counts its operations, and knows of each other timeline
how many it comes after: waiting for an event brings that knowledge over. An operation that touches bytes which another one wrote,
or writes what another one read, must come after it. So a missing wait or mark is found in every run, whatever a device would have
done first.

The double also notes each call with which a thread would wait for a device (`Device.waits`).
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.profiler import clock
from gradwire.transport import Meter, Operations, Wire, link, staged_link, streams
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.operations import _RECEIVE, _RECEIVE_ELEMENTS, _SEND
from gradwire.transport.rendezvous import CONTROL

__all__ = ["WAITS", "Device", "DeviceFuture", "DeviceLink", "Race", "SeenWire", "run_staged_ranks"]

WAITS = ("local_scalar", "nonzero", "masked_select", "unique", "repeat_interleave", "equal", "lift_fresh")
"""Parts of the names of operations that wait on a device: values that are read, sizes that depend on values, what comes from the
host."""


class Race(AssertionError):
    """Nothing orders two operations on the same bytes."""


class _Timeline:
    def __init__(self, name: str) -> None:
        self.name, self.after = name, {self: 0}

    def follow(self, others: "dict[_Timeline, int]") -> None:
        """Come after these from now on."""
        for timeline, count in others.items():
            self.after[timeline] = max(self.after.get(timeline, 0), count)


class _Touched:
    """The operations that touched the bytes of one tensor's memory."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage  # kept: memory of another tensor must not be taken for this one's
        self.by: list[tuple[int, int, bool, _Timeline, int, str]] = []


class _Recorder(TorchDispatchMode):
    """Reports each operation of the thread that entered it to the device."""

    def __init__(self, device: "Device") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views, arguments = _accesses(func)
        if call := _call_that_waits(func):
            self._device.note_wait(call)
        if "pin_memory" in (kwargs or {}):
            self._device.page_locked.append(result.untyped_storage())  # it is no stream's
        elif not views:
            given = dict(zip(arguments, args, strict=False)) | (kwargs or {})
            read, written = [], list(_tensors(result))
            for name, writes in arguments.items():
                (written if writes else read).extend(_tensors(given.get(name)))
            self._device.touch(read, written, str(func))
        return result


@cache
def _accesses(func: Any) -> tuple[bool, dict[str, bool]]:
    """Whether an operation returns a view, and by name whether it writes an argument."""
    writes = lambda each: each.alias_info is not None and each.alias_info.is_write  # noqa: E731
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return views, {each.name: writes(each) for each in func._schema.arguments}


@cache
def _call_that_waits(func: Any) -> str:
    """The operation's name if it waits on a device, else ''."""
    name = str(func)
    return name if any(word in name for word in WAITS) else ""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class Device:
    """The double. Inside `used` the streams of lanes are its streams."""

    def __init__(self) -> None:
        self.script, self.communicator = _Stream(self, "the script's stream"), _Timeline("the communicator's stream")
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._memory: dict[int, _Touched] = {}
        self.races: list[str] = []
        self.now = time.perf_counter
        """The clock of timed events, in seconds."""
        self.untimed: set[int] = set()
        """Numbers of the threads that cannot make timed events."""
        self.waits: list[tuple[int, str]] = []
        """Each call with which a thread would wait for a device: the thread's number, and the call."""
        self.kept: list[tuple[int, _Stream]] = []
        """The address of each tensor whose memory nobody else may get before a stream has done its work, and the stream."""
        self.page_locked: list[torch.UntypedStorage] = []

    # ---- what torch has

    @contextmanager
    def used(self, monkeypatch: Any) -> Iterator["Device"]:
        """`gradwire.transport.streams` uses this device, and this thread's operations are on it."""
        # torch makes another object for the stream in each call
        current = lambda device: _Stream(self, self.current.timeline.name, self.current.timeline)  # noqa: E731
        accelerator = SimpleNamespace(current_stream=current, set_device_index=self._enter_thread)
        fake = SimpleNamespace(
            Stream=lambda device, priority: _Stream(self, "a lane's stream"),
            Event=lambda device, enable_timing=False: self.event(enable_timing),
            accelerator=accelerator,
            futures=SimpleNamespace(Future=lambda devices: DeviceFuture(self, torch.futures.Future())),
        )
        with monkeypatch.context() as patch, _Recorder(self):
            patch.setattr(streams, "torch", fake)
            patch.setattr(clock, "torch", fake)
            patch.setattr(streams.DeviceStreams, "keep", lambda own, tensor: self.kept.append((tensor.data_ptr(), self.current)))
            expect = staged_link.StagedLink.expect_on_host
            patch.setattr(staged_link.StagedLink, "expect_on_host", lambda *arguments: _HostExchange(expect, arguments, self))
            for name in ("all_reduce", "broadcast"):
                patch.setattr(link.Link, name, self._by_host(getattr(link.Link, name)))
            yield self
        assert not self.races, self.races[0]

    def _enter_thread(self, index: int) -> None:
        """This thread's tensors are on the device, unless it is a control lane's, which asks for marks alone."""
        if not threading.current_thread().name.endswith(f"-{CONTROL}"):
            _Recorder(self).__enter__()

    @property
    def current(self) -> "_Stream":
        """The stream on which this thread queues."""
        stack = getattr(self._threads, "stack", None)
        script: _Stream = getattr(self._threads, "script", self.script)
        return stack[-1] if stack else script

    def event(self, timed: bool = False) -> "_Event":
        """An event. Raises RuntimeError for a timed one in a thread that cannot make them."""
        if timed and threading.get_ident() in self.untimed:
            raise RuntimeError("no timed events here")
        return _Event()

    def stream(self, name: str) -> "_Stream":
        """Another stream of the script."""
        return _Stream(self, name)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """This thread is another script, with a stream of its own."""
        self._threads.script = _Stream(self, f"the stream of {threading.current_thread().name}")
        with _Recorder(self):
            yield

    @property
    def host(self) -> _Timeline:
        """The timeline of this thread's own work."""
        if not hasattr(self._threads, "host"):
            self._threads.host = _Timeline(f"the host's thread {threading.current_thread().name}")
        host: _Timeline = self._threads.host
        return host

    def synchronize(self) -> None:
        """The host waits for the current stream."""
        self.note_wait("synchronize")
        self.host.follow(self.current.timeline.after)

    def note_wait(self, call: str) -> None:
        """This thread waits for the device, unless it works on the host's own memory."""
        if not getattr(self._threads, "computes", False):
            self.waits.append((threading.get_ident(), call))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the block on the host, at once."""
        before, self._threads.computes = getattr(self._threads, "computes", False), True
        try:
            yield
        finally:
            self._threads.computes = before

    def _by_host(self, collective: Any) -> Any:
        """A collective of links, which the host's thread does for a staged link."""

        def run(end: Any, *arguments: Any) -> Any:
            with self.on_host() if isinstance(end, staged_link.StagedLink) else nullcontext():
                return collective(end, *arguments)

        return run

    # ---- what is checked

    def touch(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], what: str) -> None:
        """An operation of the current stream, or of the host."""
        if getattr(self._threads, "computes", False):
            self.touch_on(self.host, read, written, what)
        else:
            timeline = self.current.timeline
            timeline.follow(self.host.after)  # it is queued after what this thread has done
            self.touch_on(timeline, read, written, what)

    def touch_on(self, timeline: _Timeline, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], what: str) -> None:
        """An operation. Raises Race."""
        with self._lock:
            timeline.after[timeline] += 1
            for writes, tensors in ((False, read), (True, written)):
                for tensor in tensors:
                    self._touch_one(timeline, tensor, writes, what)

    def touch_bytes(self, address: int, nbytes: int, writes: bool, what: str) -> None:
        """The host's thread reads or writes bytes of page-locked memory. Raises Race."""
        with self._lock:
            self.host.after[self.host] += 1
            for storage in self.page_locked:
                first = address - storage.data_ptr()
                if 0 <= first < storage.nbytes():
                    touched = self._memory.setdefault(storage._cdata, _Touched(storage))
                    self._touch_run(touched, self.host, first, first + nbytes, writes, what)

    def _touch_one(self, timeline: _Timeline, tensor: torch.Tensor, writes: bool, what: str) -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        touched = self._memory.setdefault(storage._cdata, _Touched(storage))
        first = tensor.storage_offset() * tensor.element_size()
        spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._touch_run(touched, timeline, first, first + (spread + 1) * tensor.element_size(), writes, what)

    def _touch_run(self, touched: _Touched, timeline: _Timeline, first: int, end: int, writes: bool, what: str) -> None:
        for low, high, wrote, other, count, before in touched.by:
            ordered = timeline.after.get(other, 0) >= count
            if (writes or wrote) and low < end and first < high and not ordered:
                race = f"{what} on {timeline.name} does not wait for {before} on {other.name}"
                self.races.append(race)
                raise Race(race)
        touched.by = [each for each in touched.by if not (each[3] is timeline and each[:3] == (first, end, writes))]
        touched.by.append((first, end, writes, timeline, timeline.after[timeline], what))


class _Stream:
    """A stream. As in torch 2.8 to 2.11 an object is entered once at a time, by one thread: it keeps what was current before."""

    def __init__(self, device: Device, name: str, timeline: _Timeline | None = None) -> None:
        self.device, self.timeline, self._is_entered = device, timeline or _Timeline(name), False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.timeline is other.timeline

    def __hash__(self) -> int:
        return hash(self.timeline)

    def wait_event(self, event: "_Event") -> None:
        self.timeline.follow(event.after)

    def __enter__(self) -> "_Stream":
        if self._is_entered:
            raise RuntimeError("Stream's context should not be initialized.")
        threads, self._is_entered = self.device._threads, True
        threads.stack = [*getattr(threads, "stack", []), self]
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_entered = False
        self.device._threads.stack = self.device._threads.stack[:-1]


class _Event:
    def __init__(self) -> None:
        self.after: dict[_Timeline, int] = {}

    def record(self, stream: _Stream) -> None:
        self.device, self.after = stream.device, dict(stream.timeline.after)
        self.at_s = self.device.now()

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from one event to another: operations of the double run at once."""
        return 1e3 * (end.at_s - self.at_s)

    def synchronize(self) -> None:
        self.device.note_wait("synchronize")
        self.device.host.follow(self.after)

    def query(self) -> bool:
        """Whether the work before it is done: operations of the double run at once, and the host knows it from now on."""
        if self.after:
            self.device.host.follow(self.after)
        return True


class DeviceFuture:
    """The part of torch's futures with devices that work on a thread needs."""

    def __init__(self, device: Device, future: Any, event: _Event | None = None) -> None:
        self._device, self._future, self._event = device, future, event or _Event()

    def set_result(self, result: Any) -> None:
        self._event.record(self._device.current)
        self._future.set_result(result)

    def then(self, callback: Any) -> "DeviceFuture":
        return DeviceFuture(self._device, self._future.then(callback), self._event)

    def wait(self) -> Any:
        """Wait for the result, and let the current stream wait for the work that makes it."""
        result = self._future.wait()
        self._device.current.timeline.follow(self._event.after)
        return result


class DeviceLink:
    """The part of a link that schemes use, with NCCL's behaviour: operations run on a stream of their own, which waits
    for the stream that is current when they begin. Nothing arrives; the tensors that would arrive are touched."""

    wire = pinned = None

    def __init__(self, device: Device, rank: int, world_size: int) -> None:
        self.device, self.rank, self.world_size = device, rank, world_size
        self.streams = streams.DeviceStreams(torch.device("cpu"))

    def expect(self, tag: int, received: Sequence[torch.Tensor]) -> "_Exchange":
        return _Exchange(self, received)

    def all_reduce(self, tensor: torch.Tensor) -> "_Begun":
        return self.begin([tensor], [tensor], "all-reduce")

    broadcast = all_reduce

    def has_failed(self) -> bool:
        return False

    has_lost_a_rank = has_failed

    def begin(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], what: str) -> "_Begun":
        """An operation of the communicator."""
        device = self.device
        device.communicator.follow(device.current.timeline.after)
        device.touch_on(device.communicator, read, written, what)
        return _Begun(device)

    def close(self) -> None:
        pass

    break_off = close


class _Begun:
    def __init__(self, device: Device) -> None:
        self._device, self._after = device, dict(device.communicator.after)

    def wait(self) -> None:
        """The current stream waits."""
        self._device.current.timeline.follow(self._after)


class _Exchange:
    def __init__(self, link: DeviceLink, received: Sequence[torch.Tensor]) -> None:
        self._link, self._received = link, received

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        own = self._link.rank
        parts = [part for rank, part in enumerate(sent) if rank != own]
        arrive = [part for rank, part in enumerate(self._received) if rank != own]
        self._begun = self._link.begin(parts, arrive, "a transfer")

    def wait(self, source: int) -> None:
        self._begun.wait()

    def finish(self) -> None:
        pass


# ---- ranks that are threads, whose tensors are on the double and travel through the host's memory


class _HostExchange:
    """An exchange of the host's memory: its checksums are the host's work."""

    def __init__(self, expect: Any, arguments: Any, device: Device) -> None:
        self._device = device
        with device.on_host():
            self._exchange = expect(*arguments)

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._exchange, name))

    def _call(self, method: Any, *arguments: Any) -> None:
        with self._device.on_host():
            method(*arguments)


class _Mail:
    """What threads of the host that pass messages know of all timelines."""

    def __init__(self) -> None:
        self.lock, self._after = threading.RLock(), dict[_Timeline, int]()

    def pass_on(self, host: _Timeline) -> None:
        """A thread leaves and takes what is known."""
        with self.lock:
            for timeline, count in host.after.items():
                self._after[timeline] = max(self._after.get(timeline, 0), count)
            host.follow(self._after)


class _HostBackend:
    """A backend that works on the host, at once."""

    def __init__(self, backend: Any, device: Device, mail: _Mail) -> None:
        self._backend, self._device, self._mail = backend, device, mail
        self._sends, self._sums = _Timeline("the backend's sends"), _Timeline("the backend's sums")

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "_HostPending":
        """Send, and read the tensor at any moment until the send is waited for."""
        pending = self._call(self._backend.send, tensors, to, tag)
        self._sends.follow(self._device.host.after)
        self._device.touch_on(self._sends, tensors, [], "a send")
        pending.after = dict(self._sends.after)
        return pending

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "_HostPending":
        """Sum, and write the tensor at any moment until the sum is waited for."""
        with self._mail.lock:  # before another rank adds its part
            pending = self._call(self._backend.allreduce, tensors, options)
            self._sums.follow(self._device.host.after)
            self._device.touch_on(self._sums, [], tensors, "a sum")
            self._mail.pass_on(self._sums)
        pending.after = dict(self._sums.after)
        return pending

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        # what `gather` carries is in no tensor, and a rank waits for the others in it
        return found if name in ("name", "gather") else partial(self._call, found)

    def _call(self, begin: Any, *arguments: Any) -> "_HostPending":
        with self._mail.lock, self._device.on_host():
            self._mail.pass_on(self._device.host)
            begun = begin(*arguments)
            self._mail.pass_on(self._device.host)
        return _HostPending(begun, self._device, self._mail)


class _HostPending:
    def __init__(self, begun: Any, device: Device, mail: _Mail) -> None:
        self._begun, self._device, self._mail = begun, device, mail
        self.after: dict[_Timeline, int] = {}

    @property
    def bytes(self) -> memoryview:
        came: memoryview = self._begun.bytes
        return came

    def wait(self, *arguments: Any) -> None:
        self._begun.wait(*arguments)
        self._device.host.follow(self.after)
        self._mail.pass_on(self._device.host)


class SeenWire:
    """A wire whose messages are the host's work."""

    def __init__(self, wire: Wire, device: Device) -> None:
        self._wire, self._device = wire, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def run(self, operations: Operations, meter: Meter) -> None:
        for each in operations.array:
            if each.kind in (_SEND, _RECEIVE, _RECEIVE_ELEMENTS):
                self._device.touch_bytes(each.target, each.arguments[0], each.kind != _SEND, "a message")
        self._wire.run(operations, meter)


@dataclass(frozen=True)
class StagedGroup(InProcessGroup):
    """A rank of `run_ranks` whose tensors are on the double."""

    device: Device
    mail: _Mail

    def stages(self, device: torch.device) -> bool:
        return True

    def connect(self, name: str, device: torch.device, timeout: timedelta) -> tuple[Any, Any]:
        backend, ends = super().connect(name, device, timeout)
        return _HostBackend(backend, self.device, self.mail), ends


def run_staged_ranks(device: Device, size: int, function: Any, timeout_s: float, *arguments: Any) -> list[Any]:
    """Run `function(group, *arguments)` on ranks of the double, which is in use. Return what each returned."""
    mail = _Mail()

    def live(group: InProcessGroup) -> Any:
        with device.in_thread():
            return function(StagedGroup(**vars(group), device=device, mail=mail), *arguments)

    return run_ranks(size, live, timeout_s=timeout_s)
