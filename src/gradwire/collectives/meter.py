"""What the codec work of a lane costs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Meter"]


@dataclass
class Meter:
    """Adds up the encodes and decodes of one lane in one step."""

    codec_seconds: float = 0.0
    """CPU time of the lane's own thread."""

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count what happens inside."""
        start = time.thread_time()
        yield
        self.codec_seconds += time.thread_time() - start
