"""Signals that arrive while ranks run, or while namespaces are made or removed."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Received:
    """The stopping signals seen so far: the first, and whether the user insisted with another one."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.insisted = False
        self._first_at = 0.0

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler. timeout(1) signals its child and its group: what comes within a second is one request."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > 1.0:
            self.insisted = True


@contextlib.contextmanager
def recorded() -> Iterator[Received]:
    """Record stopping signals instead of acting on them; ignored ones (nohup) stay ignored. Main thread only."""
    received = Received()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:
                before[number] = signal.signal(number, received.note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ExitOnTermination:
    """Between `install` and `restore`, SIGTERM and SIGHUP raise SystemExit(128 + signal), so that `with` cleans up."""

    def __init__(self) -> None:
        self._installed: list[int] = []

    def install(self) -> None:
        """Only where the default, death without cleanup, would apply."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._installed.append(number)
                signal.signal(number, _exit)

    def restore(self) -> None:
        """Put back what `install` replaced."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._installed:
            signal.signal(self._installed.pop(), signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
