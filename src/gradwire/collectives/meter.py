"""What the work of a lane costs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Meter"]


@dataclass
class Meter:
    """Adds up the tasks, and the encodes and decodes in them, of one lane in one step."""

    codec_seconds: float = 0.0
    """CPU time of the lane's own thread."""
    spans: list[tuple[float, float]] | None = None
    """For recordings: when each began and ended, in seconds of time.perf_counter, since `take_spans`. None: not kept."""
    task_seconds: float = 0.0
    """Time that passed in tasks: in codecs, on links, and waiting for what other ranks send."""

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count what happens inside."""
        began = time.perf_counter() if self.spans is not None else 0.0
        start = time.thread_time()
        yield
        self.codec_seconds += time.thread_time() - start
        if self.spans is not None:
            self.spans.append((began, time.perf_counter()))

    def take_spans(self) -> list[tuple[float, float]]:
        """Those kept since the last call."""
        taken, self.spans = self.spans or [], None if self.spans is None else []
        return taken

    @contextmanager
    def task(self) -> Iterator[None]:
        """Count what happens inside: one task."""
        start = time.perf_counter()
        yield
        self.task_seconds += time.perf_counter() - start
