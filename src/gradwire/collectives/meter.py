"""What a lane did and for how long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Meter", "Span"]


@dataclass(frozen=True)
class Span:
    """One stretch of work on a lane. Times in seconds of time.perf_counter."""

    kind: str
    """codec or wire."""
    bucket: int
    chunk: int
    start: float
    end: float


@dataclass
class Meter:
    """Collects the spans of one lane in one step; `at` says which piece is being worked on."""

    at: tuple[int, int] = (0, 0)
    spans: list[Span] = field(default_factory=list)
    codec_seconds: float = 0.0
    """CPU time of the lane's own thread."""

    @contextmanager
    def codec(self) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.thread_time()
        yield
        self.codec_seconds += time.thread_time() - cpu
        self.spans.append(Span("codec", *self.at, start, time.perf_counter()))

    @contextmanager
    def wire(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append(Span("wire", *self.at, start, time.perf_counter()))
