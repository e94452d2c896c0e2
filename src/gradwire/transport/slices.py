"""Short scheduler slices for the threads that communicate.

If all cores compute, a thread that wakes up waits for the end of a compute thread's slice. A thread may ask Linux (6.12 and
later) for shorter slices, which are scheduled sooner for the same share of the processor. No privilege is needed. Threads
inherit the request from the thread that starts them; so do gloo's threads.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

SLICE_NS = 100_000  # the shortest that Linux grants
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


@contextmanager
def short_slices() -> Iterator[bool]:
    """Give short slices to threads that are started inside. Yields whether the kernel accepted the request: old kernels do not,
    and no kernel does for a thread with a real-time policy."""
    taken = _ask(SLICE_NS)
    try:
        yield taken
    finally:
        if taken:
            _ask(0)


def _ask(slice_ns: int) -> bool:
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, niceness, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
