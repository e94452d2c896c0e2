"""Times of the work of a lane."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.transport.streams import Mark, Streams


@dataclass
class Meter:
    """Adds up the times of tasks, encodes and decodes of one lane in one step."""

    codec_seconds: float = 0.0
    """CPU time of the lane's own thread."""
    spans: list[tuple[float, float]] | None = None
    """Begin and end of each encode and decode since `take_spans`, by time.perf_counter. None: not recorded."""
    task_seconds: float = 0.0
    """Elapsed time of tasks: in codecs, on links, and waiting for other ranks."""
    on_device: list[tuple[Mark, Mark]] | None = None
    """Timed marks at the begin of each task's first encode or exchange on the device, and at its end. None: not recorded."""
    _began: Mark = None

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count the encodes and decodes inside."""
        began = time.perf_counter() if self.spans is not None else 0.0
        start = time.thread_time()
        yield
        self.codec_seconds += time.thread_time() - start
        if self.spans is not None:
            self.spans.append((began, time.perf_counter()))

    def begins(self, streams: Streams) -> None:
        """The task that runs begins on the device, on the current stream."""
        if self.on_device is not None and self._began is None:
            self._began = streams.timed_mark()

    def ends(self, streams: Streams) -> None:
        """The task that runs ends on the device, on the current stream."""
        if self.on_device is not None and self._began is not None:
            self.on_device.append((self._began, streams.timed_mark()))
            self._began = None

    def take_spans(self) -> list[tuple[float, float]]:
        """The spans since the last call."""
        taken, self.spans = self.spans or [], None if self.spans is None else []
        return taken
