"""The provenance of the numbers in a file."""

import datetime
import platform
import shlex
import socket
import sys
from pathlib import Path
from typing import ClassVar

import msgspec


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host, processor, date and command of a measurement, so that the measurement can be repeated."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("processor",)

    host: str
    date: str
    command: str
    processor: str = ""
    """Empty: not recorded."""

    @staticmethod
    def now() -> "Made":
        """Record this host, this time and the command of this process. Absolute paths are cut to their last part."""
        words = [Path(word).name if word.startswith("/") else word for word in sys.orig_argv]
        words = [word.encode("utf-8", "backslashreplace").decode() for word in words]  # bytes that are no text
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Made(host=socket.gethostname(), date=date, command=shlex.join(words), processor=processor_name())


def processor_name() -> str:
    """The processor, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
