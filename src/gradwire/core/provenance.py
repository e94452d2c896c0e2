"""The provenance of the numbers in a file."""

import datetime
import platform
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from gradwire.core.switches import RECORD_ARGUMENTS, switch

_SECRET = re.compile(r"token|secret|passw|pwd|credential|api.?key|access.?key|private.?key|auth|^-*key$", re.IGNORECASE)
_USER = re.compile(r"(\w+://)[^/@\s]*@")
_TOKEN = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|eyJ)[\w-]{8,}")
"""The beginnings of well-known kinds of tokens, whatever their option is named."""
_HIDDEN = "..."


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
        """Record this host, this time and the command of this process.

        Absolute paths are cut to their last part. Of a script's command only the script's name is kept, since files travel and
        arguments may be secrets; with `GRADWIRE_RECORD_ARGUMENTS=on` its arguments too, without values that look like secrets.
        Raises FormatError where that variable is neither on nor off.
        """
        words = without_secrets(sys.orig_argv, all_words=switch(RECORD_ARGUMENTS))
        words = [Path(word).name if word.startswith("/") else word for word in words]
        words = [word.encode("utf-8", "backslashreplace").decode() for word in words]  # bytes that are no text
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Made(host=socket.gethostname(), date=date, command=shlex.join(words), processor=processor_name())


def without_secrets(argv: Sequence[str], all_words: bool = False) -> list[str]:
    """A command without secrets. Commands of gradwire itself keep their arguments, other programs keep theirs with `all_words`.

    Left out are values of options and variables that are named like secrets (token, key, password), tokens of well-known kinds,
    what stands before the host of a URL, and code after `-c`.
    """
    with_value = ("-X", "-W")  # options of Python
    ends = (at for at, word in enumerate(argv) if at and not word.startswith("-") and argv[at - 1] not in with_value)
    end = next(ends, len(argv))
    program = Path(argv[end]).name if end < len(argv) else ""
    if argv[end - 1 : end] == ["-c"]:
        return [*argv[:end], _HIDDEN]
    if not all_words and program.partition(".")[0] != "gradwire":
        return [*argv[: end + 1]]
    kept: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        option, equals, _ = word.partition("=")
        if equals and _SECRET.search(option):
            word = f"{option}={_HIDDEN}"
        elif _SECRET.search(before) and before.startswith("-") and "=" not in before and not word.startswith("-"):
            word = _HIDDEN
        kept.append(_TOKEN.sub(_HIDDEN, _USER.sub(rf"\1{_HIDDEN}@", word)))
    return kept


def processor_name() -> str:
    """The processor, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
