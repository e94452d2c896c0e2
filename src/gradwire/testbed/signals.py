"""Signals during runs of ranks, and during the making and removing of namespaces."""

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
    """The stopping signals so far: the first one, and whether another one followed later."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.insisted = False
        self._first_at = 0.0

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler. Signals within a second are one request, because timeout(1) sends two."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > 1.0:
            self.insisted = True


@contextlib.contextmanager
def recorded() -> Iterator[Received]:
    """Record stopping signals instead of acting on them. Ignored signals (nohup) stay ignored. Main thread only."""
    received = Received()
    with _handled(lambda number: signal.getsignal(number) not in (signal.SIG_IGN, None), received.note):
        yield received


def exit_on_termination() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit(128 + signal) instead of ending the process without cleanup."""
    return _handled(lambda number: number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL, _exit)


@contextlib.contextmanager
def _handled(
    chosen: Callable[[signal.Signals], bool], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Pass the chosen stopping signals to the handler. Outside of the main thread, do nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in STOPPING if in_main and chosen(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
