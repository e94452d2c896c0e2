"""The streams a lane works on. On CPU there are none and everything is done when the call returns.

On CUDA a lane encodes on one stream and decodes on another, beside the communicator's own, and they are joined by
events: the host never waits between the first launch and the last. A mark is such an event.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

__all__ = ["Mark", "Streams", "streams_for"]

Mark = torch.Event | None
"""A moment in a stream's queue; None where there are no streams."""


class Streams(Protocol):
    """Where a lane's work is queued."""

    def enter_thread(self) -> None:
        """Called once by the lane's thread."""
        ...

    def encoding(self, after: Mark) -> AbstractContextManager[torch.Stream | None]:
        """Work inside is queued on the encode stream, after the mark. Collectives start when it is done."""
        ...

    def decoding(self) -> AbstractContextManager[torch.Stream | None]:
        """Work inside is queued on the decode stream."""
        ...

    def mark(self) -> Mark:
        """A mark in the current stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let the caller's current stream wait for a mark."""
        ...


class HostStreams:
    """No streams: the host is the order."""

    def enter_thread(self) -> None:
        pass

    def encoding(self, after: Mark) -> AbstractContextManager[torch.Stream | None]:
        return nullcontext()

    def decoding(self) -> AbstractContextManager[torch.Stream | None]:
        return nullcontext()

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass


class DeviceStreams:
    """An encode and a decode stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._encode, self._decode = torch.Stream(device), torch.Stream(device)

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self.device.index or 0)

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

    def mark(self) -> Mark:
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.accelerator.current_stream(self.device).wait_event(mark)


def streams_for(device: torch.device) -> Streams:
    """The streams of a lane for tensors on a device."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)
