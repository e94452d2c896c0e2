"""Error feedback around any compressor: the error of an encode is added to the next gradient.

Law: telescoping. The sum of the sent values over steps equals the sum of the gradients, less the last residual. With a `decay`
below 1 a part of each residual is lost instead.
The residual belongs to the caller, one for each encode of the option; the inner compressor's kernel updates it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.core import ErrorFeedback, Spec
from gradwire.kernels import Segments
from gradwire.kernels.cpu import Call


class ErrorFeedbackCompressor(Compressor):
    """Declares a residual; the inner compressor encodes and decodes."""

    def __init__(self, spec: Spec, inner: Compressor) -> None:
        super().__init__(spec)
        self.inner = inner
        self._decay = spec.decay if isinstance(spec, ErrorFeedback) else 1.0

    def for_sum(self) -> Compressor:
        return self._around(self.inner.for_sum())

    def summing(self, terms: int, ranks: int) -> Compressor:
        return self._around(self.inner.summing(terms, ranks))

    def _around(self, inner: Compressor) -> Compressor:
        return self if inner is self.inner else ErrorFeedbackCompressor(self.spec, inner)

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> Any:
        """The program of an inner compressor with sums on the wire."""
        return self.inner.program(flat, state, segments)  # type: ignore[attr-defined]  # its spec has rounds

    @property
    def runs_in_c(self) -> bool:
        return self._decay == 1 and self.inner.runs_in_c and type(self).__module__.startswith("gradwire.")

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[Call]:
        return self.inner.encode_calls(src, state, segments, context, payload)

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[Call]:
        return self.inner.decode_calls(payload, segments, dtype, add, dst, context)

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        if self._decay < 1 and state:
            state[0].mul_(self._decay)
        self.inner.encode(src, state, segments, context, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.inner.decode(payload, segments, dtype, add, dst, context)
