"""Threads that wait for the rendezvous store when the interpreter ends.

A thread that returns from C++ to Python while the interpreter ends is ended by force, in the middle of C++, and that ends the
whole process with SIGABRT. The store's host may be gone or stopped, so that its answer comes at any time, or never.
"""

import atexit
import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_S = 1.0
"""For all threads together, at the exit of the interpreter."""
_MORE_PATIENCE_S = 4.0
"""For threads that compute then: on a busy machine they take a while until they are done, or wait in the kernel."""
_SAME, _STUCK = 2, 20
"""Looks, 10 ms apart, that find a thread at the same place: until it counts as waiting, and until nobody waits for its lock."""
_FUTEX = {"202", "98"}
"""The numbers of the system call with which threads wait for locks, on x86-64 and aarch64."""
_WAITS = {
    "x86_64": {"7", "23", "35", "42", "45", "47", "230", "232", "270", "271", "281"},
    "aarch64": {"22", "72", "73", "101", "115", "203", "207", "212"},
}
"""The numbers of poll, ppoll, select, pselect, epoll_wait, epoll_pwait, connect, recvfrom, recvmsg and the sleeps. In another
call a thread may hold a lock of the C library."""
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


def start_store_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon that asks the store. It is guarded until what only `work` holds is freed: whoever frees a process group
    returns from C++. Nothing is asked once the interpreter ends."""
    box = [work]
    thread = threading.Thread(target=_run, args=(box,), name=name, daemon=True)
    _waiting.add(thread)
    try:
        thread.start()
    except BaseException:
        _waiting.discard(thread)
        raise
    return thread


def _run(box: list[Callable[[], None]]) -> None:
    try:
        if not _ends.is_set():
            box.pop()()
        box.clear()
    finally:
        _waiting.discard(threading.current_thread())


@atexit.register
def _end_waits() -> None:
    _ends.set()
    until = time.monotonic() + _PATIENCE_S
    while _waiting and time.monotonic() < until:
        time.sleep(0.01)
    held: set[threading.Thread] = set()
    seen: dict[threading.Thread, tuple[list[str], int]] = {}
    while (others := _waiting - held) and time.monotonic() < until + _MORE_PATIENCE_S:
        are_stuck = True
        for thread in others:
            call, (before, looks) = _call_of(thread), seen.get(thread, ([], 0))
            looks = looks + 1 if call == before else 1
            seen[thread] = call, looks
            if looks >= _SAME and call[0] in _WAITS.get(platform.machine(), ()):
                _hold(thread)
                held.add(thread)
            are_stuck = are_stuck and looks >= _STUCK and call[0] in {"", *_FUTEX}
        if are_stuck:
            return
        time.sleep(0.01)


def _call_of(thread: threading.Thread) -> list[str]:
    """The system call in which a thread waits, with its arguments and place; "running" if it computes, and "" if nobody knows."""
    try:
        return Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split() or [""]
    except OSError:
        return [""]


def _hold(thread: threading.Thread) -> None:
    """Let a thread that waits in the kernel wait for ever, in a signal handler that never returns."""
    with suppress(OSError, AttributeError, StopIteration):  # it has ended; another system; no signal is free
        library = ctypes.CDLL(None)
        free = next(each for each in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(each) == signal.SIG_DFL)
        library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        library.signal(free, ctypes.cast(library.pause, ctypes.c_void_p))
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, free)
