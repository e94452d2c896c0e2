"""The default output of the lines that ranks write."""

import sys
from collections.abc import Callable

from gradwire.errors import TestbedError

LineCallback = Callable[[int, str, str], None]


def print_with_prefix(rank: int, stream: str, line: str) -> None:
    """Print `[rank] line` on the stream it came from."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    encoding = getattr(target, "encoding", None) or "utf-8"
    try:
        print(f"[{rank}] {line}".encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)
    except BrokenPipeError:
        raise  # the reader has ended
    except OSError as error:
        raise TestbedError(f"the output of rank {rank} cannot be printed: {error.strerror or error}.") from error
