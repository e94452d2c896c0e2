"""The time that a process works on processors, and that it waits for one. Pure: no torch."""

import time
from contextlib import suppress


def waited_ns() -> int:
    """Nanoseconds for which this thread could have run and waited for a processor; 0 where Linux does not count them."""
    with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1])
    return 0


def needed_s() -> float:
    """Seconds for which the process needed a processor: those of all threads on one, and those that this thread waited for one.

    So a rank that shares its processor with another needs one all the time, although it has it half the time.
    """
    return time.process_time() + waited_ns() / 1e9
