"""Short scheduler slices for lane threads.

On a machine whose cores all compute, a lane that wakes up waits for the compute thread's slice to end, and gloo's own thread
spins while a lane is descheduled inside a send. A thread may ask Linux (6.12 and later) for shorter slices of its own, which
are scheduled sooner for the same share of the processor; no privilege is needed and other threads are left alone.
"""

import ctypes
import platform
import struct
import sys

__all__ = ["ask_for_short_slices"]

SLICE_NS = 100_000  # the shortest that Linux grants
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def ask_for_short_slices() -> bool:
    """Ask for the calling thread. Returns whether the kernel took the request; older ones ignore or refuse it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
