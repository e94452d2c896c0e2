"""Times of the work of a lane."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """Adds up the times of tasks, encodes and decodes of one lane in one step."""

    codec_seconds: float = 0.0
    """CPU time of the lane's own thread."""
    spans: list[tuple[float, float]] | None = None
    """Begin and end of each encode and decode since `take_spans`, by time.perf_counter. None: not recorded."""
    task_seconds: float = 0.0
    """Elapsed time of tasks: in codecs, on links, and waiting for other ranks."""

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count the encodes and decodes inside."""
        began = time.perf_counter() if self.spans is not None else 0.0
        start = time.thread_time()
        yield
        self.codec_seconds += time.thread_time() - start
        if self.spans is not None:
            self.spans.append((began, time.perf_counter()))

    def take_spans(self) -> list[tuple[float, float]]:
        """The spans since the last call."""
        taken, self.spans = self.spans or [], None if self.spans is None else []
        return taken
