"""MemoryError at a line of gradwire's own part of a step, as where memory is short at an allocation."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["short_memory"]

OURS = ("gradwire.engine", "gradwire.exchange", "gradwire.collectives", "gradwire.api", "gradwire.integrations")
OUTSIDE = ("step", "told", "ddp_hook")
"""Functions that run before `optimizer.step` and before gradwire's part. A failure there is like a failure in the
script, one line before."""


@contextmanager
def short_memory(line: int) -> Iterator[list[str]]:
    """Raises MemoryError when this thread comes to the line of this number in gradwire. What it yields names all lines until
    then."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        ours = frame.f_globals.get("__name__", "").startswith(OURS)
        if not ours or frame.f_code.co_name in OUTSIDE:
            return None
        if event == "line" and not _is_with(frame):
            seen.append(f"{frame.f_globals['__name__']}:{frame.f_lineno}")
            if len(seen) == line:
                sys.settrace(None)
                raise MemoryError("as ordered")
        return trace

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)


def _is_with(frame: FrameType) -> bool:
    """Return whether the line is that of a `with`. Python comes there again when the block ends, and an error would
    leave it open."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
