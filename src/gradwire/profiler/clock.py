"""Moments on a device: of what was queued before them on a GPU, of now on a CPU."""

import time
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """Marks moments, and tells the time between two of them when everything is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """A moment: when the device has done what is in the current stream so far."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def us(self, start: Any, end: Any) -> float:
        """Microseconds from one moment to another. Waits for the later one."""
        if self.device.type == "cpu":
            return float(end - start) * 1e6
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
