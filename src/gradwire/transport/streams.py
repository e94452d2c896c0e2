"""The streams that a lane uses. On CPU there are none: a call returns when its work is done.

On CUDA a lane encodes on one stream and decodes on another, apart from the communicator's own. Events join the
streams, and a mark is such an event. With NCCL the host never waits between the first launch and the last; a host-staged lane's
thread waits for the copies to the host.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Mark = torch.Event | None
"""A moment in a stream's queue; None on CPU."""


class Streams:
    """The streams of a lane; here those of a CPU, which has none."""

    def enter_thread(self) -> None:
        """Prepare the lane's thread, which calls this once."""

    def for_thread(self) -> "Streams":
        """Streams of the same device for another thread: torch keeps in a stream what was current before it was entered."""
        return self

    def encoding(self, after: Mark) -> AbstractContextManager[torch.Stream | None]:
        """Queue the work inside on the encode stream, after the mark. Collectives start when the work is done."""
        return nullcontext()

    def decoding(self) -> AbstractContextManager[torch.Stream | None]:
        """Queue the work inside on the decode stream."""
        return nullcontext()

    def current(self) -> AbstractContextManager[torch.Stream | None]:
        """The stream that is current now. Work inside is queued on it, whatever is current then."""
        return nullcontext()

    def keep(self, tensor: torch.Tensor) -> None:
        """Do not let torch use the tensor's memory for others before the current stream has done its work so far, and what is
        queued on it until the tensor goes."""

    def future(self) -> torch.futures.Future[Any]:
        """A future. Who waits for it lets the current stream wait for the stream that was current when the result was set."""
        return torch.futures.Future()

    def mark(self) -> Mark:
        """A mark in the current stream."""
        return None

    def timed_mark(self) -> Mark:
        """A mark for `elapsed_s`. Nothing may wait for it."""
        return None

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """The seconds from one timed mark to another, on the device. Waits for the later one. 0 on CPU."""
        return 0.0

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for a mark."""

    def after(self, other: torch.Stream | None) -> torch.Stream | None:
        """Let the current stream wait for what `other` has queued, if that is another one. Returns the current stream; None on
        CPU."""
        return None

    def synchronize(self, mark: Mark) -> None:
        """Let the host's thread wait for a mark."""

    def is_done(self, mark: Mark) -> bool:
        """Whether all work before a mark is done. Raises RuntimeError if the device reports an error."""
        return True


class DeviceStreams(Streams):
    """An encode and a decode stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # of high priority: a codec's kernels run before those of the backward that are queued already
        self._encode, self._decode = torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self.device.index or 0)

    def for_thread(self) -> "Streams":
        return DeviceStreams(self.device)

    @contextmanager
    def encoding(self, after: Mark) -> Iterator[torch.Stream | None]:
        if after is not None:
            self._encode.wait_event(after)
        with self._encode:
            yield self._encode

    @contextmanager
    def decoding(self) -> Iterator[torch.Stream | None]:
        with self._decode:
            yield self._decode

    def current(self) -> AbstractContextManager[torch.Stream | None]:
        stream: torch.Stream = torch.accelerator.current_stream(self.device)
        return stream

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.accelerator.current_stream(self.device))

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self.device])

    def mark(self) -> Mark:
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def timed_mark(self) -> Mark:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        assert start is not None and end is not None
        if not self.is_done(end):
            self.synchronize(end)
        return float(start.elapsed_time(end)) / 1e3

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.accelerator.current_stream(self.device).wait_event(mark)

    def after(self, other: torch.Stream | None) -> torch.Stream | None:
        current: torch.Stream = torch.accelerator.current_stream(self.device)
        if other is not None and other != current:
            event = torch.Event(self.device)
            event.record(other)
            current.wait_event(event)
        return current

    def synchronize(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def is_done(self, mark: Mark) -> bool:
        return mark is None or mark.query()


def streams_for(device: torch.device) -> Streams:
    """The streams of a lane for tensors on a device."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)
