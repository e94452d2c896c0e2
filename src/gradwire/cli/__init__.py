"""Implements the command line. A command imports heavy modules only when it runs."""

import contextlib
import errno
import os
import sys
from typing import NoReturn

from gradwire.cli import jobs, listing, planning
from gradwire.cli.app import app
from gradwire.errors import FormatError, GradwireError
from gradwire.renames import old_words

__all__ = ["app", "jobs", "listing", "main", "planning"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why a file takes no more. Where a command writes a file itself, the error is a GradwireError: any other is the output's."""


def main() -> None:
    """Run the `gradwire` program. A GradwireError is printed as one message, and so is why the output cannot be written; the exit
    code is then 2."""
    try:
        if old := old_words(sys.argv[1:]):
            raise FormatError(old)
        try:
            app(prog_name="gradwire")
        except SystemExit:
            _flush()
            raise
    except GradwireError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        _fail(f"the output cannot be written: {error.strerror}. Make room, or send it elsewhere.")


def _flush() -> None:
    """Let what was printed fail now, and not when Python ends. A reader that is gone, as `head`, is no failure."""
    with contextlib.suppress(BrokenPipeError):
        if sys.stdout is not None:
            sys.stdout.flush()


def _fail(message: str) -> NoReturn:
    """Print the message, if that is possible, and exit. What cannot be written is dropped: when Python ends it would fail once
    more, and change the exit code."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"gradwire: {message}\n")):
        if stream is not None:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(2)
