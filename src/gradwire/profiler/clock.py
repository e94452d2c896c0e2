"""A clock for devices. A moment on a GPU is the end of the work queued so far; a moment on a CPU is now."""

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Marks moments and measures the time between them."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter, queues: bool | None = None) -> None:
        """now: the clock of a CPU, in seconds. queues: whether work is queued on the device; None: on any device but a CPU."""
        self.device, self._now = device, now
        self._queues = device.type != "cpu" if queues is None else queues

    def mark(self) -> Any:
        """Return the moment when the device has done the work in the current stream so far."""
        if not self._queues:
            return self._now()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def us(self, start: Any, end: Any) -> float:
        """Return the microseconds from one moment to another. Waits for the later one."""
        if not self._queues:
            return float(end - start) * 1e6
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
