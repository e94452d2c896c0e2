"""Compressors that are lists of kernel calls. An encode or decode makes the list, and the kernels of a device run it."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core import Spec
from gradwire.kernels import (
    Compressor,
    Context,
    KernelCall,
    Segments,
    WrappingCompressor,
    cpu,
    kernels_for,
    refused,
    run_calls,
)

__all__ = ["Compressor", "Context", "KernelCompressor", "ListCompressor", "WrappingListCompressor", "aligned", "residual_in"]


class ListCompressor(Compressor):
    """A compressor that says which kernels an encode and a decode call, in order. C++, Triton and the reference run the lists."""

    @abstractmethod
    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        """The calls that write the payload; see `Compressor.encode`. Asked once for the same tensors where C++ runs the list in
        every step."""

    @abstractmethod
    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        """The calls that write or add the decoded values; see `Compressor.decode`."""

    def encode(self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor) -> None:
        run_calls(self.encode_calls(src, state, segments, context, payload))

    def decode(self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context) -> None:
        with refused(self.spec):
            run_calls(self.decode_calls(payload, segments, dtype, add, dst, context))

    @property
    def runs_in_c(self) -> bool:
        # a class of another package may do more than call a kernel
        return type(self).__module__.startswith("gradwire.") and kernels_for("cpu") is cpu


class WrappingListCompressor(WrappingCompressor, ListCompressor):
    """A compressor whose lists contain those of an inner compressor."""

    @property
    def runs_in_c(self) -> bool:
        return self.inner.runs_in_c and super().runs_in_c


class KernelCompressor(ListCompressor):
    """A compressor with one kernel for each direction, which the spec names."""

    def __init__(self, spec: Spec, part: float = 1.0) -> None:
        """`part`: what gradients were multiplied by, and fixed magnitudes are."""
        super().__init__(spec)
        kernels = spec.kernels(part)
        assert kernels is not None, f"{spec!r} names no kernels"
        self.kernels, self._part = kernels, part

    def for_sum(self) -> Compressor:
        return self._of_part(1.0)

    def summing(self, terms: int, ranks: int) -> Compressor:
        return self._of_part(terms / ranks)

    def _of_part(self, part: float) -> Compressor:
        same = part == self._part or self.spec.kernels(part) == self.kernels
        return self if same else type(self)(self.spec, part)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        (name, *settings), random = self.kernels.encode, [context.random] if self.kernels.random else []
        return [(name, src, residual_in(state), self._seen(segments), *random, *self._weights(segments), *settings, payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        (name, *settings), typed = self.kernels.decode, [dtype] if self.kernels.typed else []
        return [(name, payload, self._seen(segments), *typed, *self._weights(segments), *settings, add, dst)]

    def _weights(self, segments: Segments) -> list[Tensor | None]:
        return [segments.weights] if self.kernels.weighted else []

    @property
    def batches(self) -> bool:
        return self.spec.batches

    def _seen(self, segments: Segments) -> Segments:
        return segments.joined if self.kernels.joined else segments


def residual_in(state: Sequence[Tensor]) -> Tensor | None:
    """The residual, for compressors without other state."""
    return state[0] if state else None


def aligned(payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[KernelCall]]:
    """The numbers of a payload. If it begins at an odd byte: a copy of the bytes, and the call that copies."""
    if payload.storage_offset() % dtype.itemsize == 0:
        return payload.view(dtype), []
    copied = torch.empty_like(payload)
    return copied.view(dtype), [("copy_into", copied, payload)]
