"""Signals that arrive while ranks run, or while namespaces are made or removed."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    with _handled(lambda number: signal.getsignal(number) not in (signal.SIG_IGN, None), received.note):
        yield received


def exit_on_termination() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit(128 + signal) where their default, death without cleanup, would apply."""
    return _handled(lambda number: number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL, _exit)


@contextlib.contextmanager
def _handled(
    chosen: Callable[[signal.Signals], bool], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """The chosen stopping signals go to the handler. Only the main thread may ask for that; elsewhere nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in STOPPING if in_main and chosen(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
