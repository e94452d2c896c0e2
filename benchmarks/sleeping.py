"""A sleeping accelerator: a device that works for given times, one work after the other, for tests of offload without a GPU.

Computation and the codecs of the device are sleeps. Their results are real: each work is done on the host first, and
then the device sleeps until the work's time is over. So gradients, payloads and sums are right, and a processor is free
while the device works. Exchanges use real sockets, and codecs that a plan puts on CPUs run there.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.core import Points
from gradwire.costs import time_at
from gradwire.kernels import Compressor, Context, Segments, WrappingCompressor

T = TypeVar("T")

_GRACE_S = 0.3e-3
"""Longest time, in seconds, for which computation leaves the device idle for a codec that has just become ready. It
counts as computation."""


class SleepingAccelerator:
    """A device that stands in for a GPU: see `gradwire.transport.devices.stand_in`."""

    name = "sleeping accelerator"

    def __init__(self, encode: Points, decode: Points) -> None:
        """encode, decode: the microseconds of one call, by bytes of gradient in float32."""
        self.encode, self.decode = encode, decode
        self.works = self.late = 0
        """Number of works done, and number of works that took longer on the host than their time on the device."""
        self._turns = threading.Condition()
        self._busy, self._codecs_waiting = False, 0
        self._freed_at = 0.0

    def codec(self, codec: Compressor) -> "SleepingCodec":
        """Return the codec as it runs on this device."""
        return SleepingCodec(codec, self)

    def compute(self, us: float, work: Callable[[], T]) -> T:
        """Run computation of `us` microseconds on the device. A codec that waits for the device goes first."""
        asked = time.perf_counter()
        time.sleep(min(_GRACE_S, us / 1e6))
        with self._turns:
            self._turns.wait_for(lambda: not self._busy and not self._codecs_waiting)
            self._busy = True
            idle_s = time.perf_counter() - max(asked, self._freed_at)
        return self._work(us / 1e6 - idle_s, work)

    def code(self, us: float, work: Callable[[], object]) -> None:
        """Run an encode or decode of `us` microseconds on the device."""
        with self._turns:
            self._codecs_waiting += 1
            self._turns.wait_for(lambda: not self._busy)
            self._codecs_waiting -= 1
            self._busy = True
        self._work(us / 1e6, work)

    def _work(self, seconds: float, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            result = work()
            left_s = began + seconds - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            return result
        finally:
            with self._turns:
                self.works += 1
                self.late += time.perf_counter() > began + 1.1 * max(seconds, 0.0) + _GRACE_S
                self._busy, self._freed_at = False, time.perf_counter()
                self._turns.notify_all()


class SleepingCodec(WrappingCompressor):
    def __init__(self, codec: Compressor, accelerator: SleepingAccelerator) -> None:
        super().__init__(codec.spec, codec)
        self._accelerator = accelerator

    def around(self, inner: Compressor) -> "SleepingCodec":
        """Return another codec on the same device."""
        return SleepingCodec(inner, self._accelerator)

    def encode(self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor) -> None:
        """Encode as soon as the device is free, for as long as an encode takes there."""
        us = time_at(self._accelerator.encode, 4 * segments.numel)
        self._accelerator.code(us, lambda: self.inner.encode(src, state, segments, context, payload))

    def decode(self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context) -> None:
        """Decode as soon as the device is free, for as long as a decode takes there."""
        us = time_at(self._accelerator.decode, 4 * segments.numel)
        self._accelerator.code(us, lambda: self.inner.decode(payload, segments, dtype, add, dst, context))
