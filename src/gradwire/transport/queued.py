"""Steps whose last operations are queued on a device, and have perhaps not run yet."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from gradwire.transport.streams import Mark, Streams

COMPLETE = -1
"""All operations of the step have completed without an error."""
UNKNOWN_BUCKET = -2
"""Operations of the step failed, and nothing tells those of which bucket."""
GRACE_S = 10.0
"""So long operations may still take when a rank has ended: it may have ended well, after its own operations."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 5e-3


class QueuedStep(NamedTuple):
    """A step whose operations are queued on a device."""

    step: int
    lanes: Sequence[tuple[Any, Mark]]
    """The link of each lane, and the mark behind its last operation."""
    buckets: Sequence["Future[list[Mark] | None]"]
    """The marks of each bucket's tasks."""
    order: list[int]
    """The buckets in launch order."""

    @property
    def is_on_device(self) -> bool:
        """Whether anything is queued."""
        return any(mark is not None for _, mark in self.lanes)

    def await_end(self, timeout_s: float, has_lost_a_rank: Callable[[], bool]) -> int:
        """Wait until all operations have completed. Returns COMPLETE, or the first bucket with an operation that failed or did
        not complete in time. Where the device reports an error, nothing more will complete."""
        until, pause, is_late = time.monotonic() + timeout_s, _FIRST_PAUSE_S, False
        while (are_done := self._are_done()) is False:
            if any(link.has_failed() for link, _ in self.lanes) or time.monotonic() >= until:
                return self._first_incomplete()
            if not is_late and has_lost_a_rank():
                is_late, until = True, min(until, time.monotonic() + GRACE_S)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        # an operation that was ended because it failed counts as complete on its stream
        is_lost = are_done is None or any(link.has_failed() for link, _ in self.lanes)
        return self._first_incomplete() if is_lost else COMPLETE

    def _are_done(self) -> bool | None:
        """Whether the device has come to the marks of all lanes. None: it reports an error."""
        try:
            return all(link.streams.is_done(mark) for link, mark in self.lanes)
        except RuntimeError:
            return None

    def _first_incomplete(self) -> int:
        streams = self.lanes[0][0].streams
        for bucket in self.order:
            future = self.buckets[bucket]
            if future.done() and not all(_is_done(streams, mark) for mark in future.result() or ()):
                return bucket
        return UNKNOWN_BUCKET


def _is_done(streams: Streams, mark: Mark) -> bool:
    """Whether the device has come to a mark. A device that reports an error comes to none."""
    try:
        return streams.is_done(mark)
    except RuntimeError:
        return False
