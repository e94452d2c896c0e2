"""Threads that wait for the rendezvous store when the interpreter ends.

A thread that returns from C++ to Python while the interpreter ends is ended by force, in the middle of C++, and that ends the
whole process with SIGABRT. The store's host may be gone or stopped, so that its answer comes at any time, or never.
"""

import atexit
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["waits_for_store"]

_PATIENCE_S = 1.0
"""For all threads together, at the exit of the interpreter."""
_MORE_PATIENCE_S = 4.0
"""For threads that compute then: on a busy machine they take a while until they are done, or wait in the kernel."""
_FUTEX = {"202", "98"}
"""The numbers of the system call with which threads wait for locks, on x86-64 and aarch64."""
_waiting: set[threading.Thread] = set()
_ends = threading.Event()
os.register_at_fork(after_in_child=_waiting.clear)


@contextmanager
def waits_for_store() -> Iterator[None]:
    """Guard calls of the store by this thread. Raises RuntimeError once the interpreter ends."""
    thread = threading.current_thread()
    _waiting.add(thread)
    try:
        if _ends.is_set():
            raise RuntimeError("the interpreter ends, so the store is not asked")
        yield
    finally:
        _waiting.discard(thread)


@atexit.register
def _end_waits() -> None:
    _ends.set()
    until = time.monotonic() + _PATIENCE_S
    while _waiting and time.monotonic() < until:
        time.sleep(0.01)
    held: set[threading.Thread] = set()
    while (others := _waiting - held) and time.monotonic() < until + _MORE_PATIENCE_S:
        held.update(thread for thread in others if _hold(thread))
        time.sleep(0.01)


def _hold(thread: threading.Thread) -> bool:
    """Let a thread that waits in the kernel wait for ever, in a signal handler that never returns. Returns False for a thread
    that does anything else: it may hold a lock."""
    with suppress(OSError, AttributeError, StopIteration):  # it has ended; another system; no signal is free
        library = ctypes.CDLL(None)
        free = next(each for each in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(each) == signal.SIG_DFL)
        doing = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
        if thread.ident is None or doing[0] in {"running", *_FUTEX}:
            return False
        library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        library.signal(free, ctypes.cast(library.pause, ctypes.c_void_p))
        signal.pthread_kill(thread.ident, free)
    return True
