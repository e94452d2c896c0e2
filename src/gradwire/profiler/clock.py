"""Moments on a device: of what was queued before them on a GPU, of now on a CPU."""

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """Marks moments, and tells the time between two of them when everything is over."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds that pass on this rank, for a CPU."""
        self.device, self._now = device, now

    def mark(self) -> Any:
        """A moment: when the device has done what is in the current stream so far."""
        if self.device.type == "cpu":
            return self._now()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def us(self, start: Any, end: Any) -> float:
        """Microseconds from one moment to another. Waits for the later one."""
        if self.device.type == "cpu":
            return float(end - start) * 1e6
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
