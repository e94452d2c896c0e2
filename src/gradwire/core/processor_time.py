"""The time that a process works on processors, and that it waits for one. Pure: no torch."""

import threading
import time
from contextlib import suppress
from typing import NamedTuple


def waited_ns() -> int:
    """Nanoseconds for which this thread could have run and waited for a processor; 0 where Linux does not count them."""
    with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1])
    return 0


class ProcessorNeed(NamedTuple):
    """The processor time of a process so far, and how long this thread has waited for a processor.

    A rank that shares its processor with another needs one all the time, although it has it half the time.
    """

    worked_s: float
    """The time of all threads."""
    waited_s: float
    thread: int

    @staticmethod
    def now() -> "ProcessorNeed":
        return ProcessorNeed(time.process_time(), waited_ns() / 1e9, threading.get_ident())

    def since(self, before: "ProcessorNeed") -> float:
        """Seconds for which a processor was needed meanwhile. Waits count if one thread looked both times."""
        waited_s = self.waited_s - before.waited_s if self.thread == before.thread else 0.0
        return self.worked_s - before.worked_s + waited_s
