"""A double of a device's streams and events: operations run at once on CPU tensors, and any two that no wait orders are an error.

Each timeline (a stream, the communicator's stream, a thread of the host) counts its operations, and knows of each other timeline
how many it comes after: waiting for an event brings that knowledge over. An operation that touches bytes which another one wrote,
or writes what another one read, must come after it. So a missing wait or mark is found in every run, whatever a device would have
done first.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.transport import streams

__all__ = ["Device", "DeviceLink", "Race"]


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
        schema = func._schema
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if not views:
            given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | (kwargs or {})
            read, written = [], list(_tensors(result))
            for argument in schema.arguments:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                (written if writes else read).extend(_tensors(given.get(argument.name)))
            self._device.touch(read, written, str(func))
        return result


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

    # ---- what torch has

    @contextmanager
    def used(self, monkeypatch: Any) -> Iterator["Device"]:
        """`gradwire.transport.streams` uses this device, and this thread's operations are on it."""
        accelerator = SimpleNamespace(
            current_stream=lambda device: self.current, set_device_index=lambda index: _Recorder(self).__enter__()
        )
        fake = SimpleNamespace(
            Stream=lambda device: _Stream(self, "a lane's stream"),
            Event=lambda device: _Event(),
            accelerator=accelerator,
        )
        with monkeypatch.context() as patch, _Recorder(self):
            patch.setattr(streams, "torch", fake)
            yield self
        assert not self.races, self.races[0]

    @property
    def current(self) -> "_Stream":
        """The stream on which this thread queues."""
        stack = getattr(self._threads, "stack", None)
        return stack[-1] if stack else self.script

    @property
    def host(self) -> _Timeline:
        """The timeline of this thread's own work."""
        if not hasattr(self._threads, "host"):
            self._threads.host = _Timeline(f"the host's thread {threading.current_thread().name}")
        host: _Timeline = self._threads.host
        return host

    def synchronize(self) -> None:
        """The host waits for the current stream."""
        self.host.follow(self.current.timeline.after)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the block on the host, at once."""
        self._threads.computes = True
        try:
            yield
        finally:
            self._threads.computes = False

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

    def _touch_one(self, timeline: _Timeline, tensor: torch.Tensor, writes: bool, what: str) -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        touched = self._memory.setdefault(storage._cdata, _Touched(storage))
        first = tensor.storage_offset() * tensor.element_size()
        spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + (spread + 1) * tensor.element_size()
        for low, high, wrote, other, count, before in touched.by:
            ordered = timeline.after.get(other, 0) >= count
            if (writes or wrote) and low < end and first < high and not ordered:
                race = f"{what} on {timeline.name} does not wait for {before} on {other.name}"
                self.races.append(race)
                raise Race(race)
        touched.by = [each for each in touched.by if not (each[3] is timeline and each[:3] == (first, end, writes))]
        touched.by.append((first, end, writes, timeline, timeline.after[timeline], what))


class _Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.timeline = device, _Timeline(name)

    def wait_event(self, event: "_Event") -> None:
        self.timeline.follow(event.after)

    def __enter__(self) -> "_Stream":
        threads = self.device._threads
        threads.stack = [*getattr(threads, "stack", []), self]
        return self

    def __exit__(self, *_: Any) -> None:
        self.device._threads.stack = self.device._threads.stack[:-1]


class _Event:
    def __init__(self) -> None:
        self.after: dict[_Timeline, int] = {}

    def record(self, stream: _Stream) -> None:
        self.after = dict(stream.timeline.after)


class DeviceLink:
    """The part of a link that schemes use, with NCCL's behaviour: operations run on a stream of their own, which waits
    for the stream that is current when they begin. Nothing arrives; the tensors that would arrive are touched."""

    wire = None

    def __init__(self, device: Device, rank: int, world_size: int) -> None:
        self.device, self.rank, self.world_size = device, rank, world_size
        self.streams = streams.DeviceStreams(torch.device("cpu"))

    def expect(self, tag: int, received: Sequence[torch.Tensor]) -> "_Exchange":
        return _Exchange(self, received)

    def all_reduce(self, tensor: torch.Tensor) -> "_Begun":
        return self.begin([tensor], [tensor], "all-reduce")

    broadcast = all_reduce

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
