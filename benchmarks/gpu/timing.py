"""Times of calls on a device and of the host that queues them."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Medians over some tries."""

    us: float
    """Time of a call on the device."""
    copy_us: float
    """Time of a copy, measured in turn with the call."""
    ratio: float
    """Median of copy time / call time."""
    host_us: float
    """Time in which the host queues a call."""


def run_of(call: Callable[[], object], device: str, calls: int) -> tuple[float, float]:
    """Microseconds of a call on the device, and of the host for queueing it, over several that are queued one after another."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            call()
        us = (time.perf_counter() - began) * 1e6 / calls
        return us, us
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    host = (time.perf_counter() - began) * 1e6 / calls
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls, host


def beside_copy(call: Callable[[], object], copy: Callable[[], object], device: str, pairs: int, calls: int) -> Times:
    """A call and a copy, timed in turn: A B A B."""
    for warm_up in (copy, call, copy, call):  # the first call compiles
        run_of(warm_up, device, 1)
    found = [(run_of(copy, device, calls)[0], *run_of(call, device, calls)) for _ in range(pairs)]
    copies, own, host = (statistics.median(which) for which in zip(*found, strict=True))
    return Times(own, copies, statistics.median(copied / us for copied, us, _ in found), host)
