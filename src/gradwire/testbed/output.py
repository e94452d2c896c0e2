"""Lines out of the raw bytes of a rank's stdout and stderr."""

import codecs
import io
import sys
from collections.abc import Callable

from gradwire.errors import TestbedError

LineCallback = Callable[[int, str, str], None]

_LONGEST_LINE = 16 * 1024 * 1024  # characters; what is longer is handed on in parts, so that memory stays bounded


def print_with_prefix(rank: int, stream: str, line: str) -> None:
    """Print `[rank] line` on the stream it came from."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    encoding = getattr(target, "encoding", None) or "utf-8"
    try:
        print(f"[{rank}] {line}".encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)
    except BrokenPipeError:
        raise  # whoever read it has left
    except OSError as error:
        raise TestbedError(f"what rank {rank} said cannot be printed: {error.strerror or error}.") from error


class LineSplitter:
    r"""Cut bytes into lines at \n, \r\n and \r (progress bars), whatever pieces they arrive in.

    Bytes that are not UTF-8 become backslash escapes: nothing is lost.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\ntw"), splitter.feed(b"o\r\n\xff"), splitter.finish()
    (['one'], ['two'], ['\\xff'])
    """

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._pieces: list[str] = []  # of the line that has not ended yet
        self._length = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        return self._split(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """The lines left at the end of the stream; the last may have had no newline."""
        lines = self._split(self._decoder.decode(b"", final=True))
        return lines + self._take() if self._length else lines

    def _split(self, text: str) -> list[str]:
        *ended, rest = text.split("\n")
        lines = []
        for part in ended:
            self._pieces.append(part)
            lines += self._take()
        self._pieces.append(rest)
        self._length += len(rest)
        return lines + self._take() if self._length >= _LONGEST_LINE else lines

    def _take(self) -> list[str]:
        line = "".join(self._pieces)
        self._pieces, self._length = [], 0
        return [line]
