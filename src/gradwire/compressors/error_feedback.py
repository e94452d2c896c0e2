"""Error feedback around any compressor: the error of an encode is added to the next gradient.

Law: telescoping. The sum of the sent values over steps equals the sum of the gradients, less the last residual. With a `decay`
below 1 a part of each residual is lost instead.
The residual belongs to the caller, one for each encode of the option; the inner compressor's kernel updates it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, WrappingListCompressor
from gradwire.compressors.registry import compressor_for
from gradwire.core import ErrorFeedback
from gradwire.kernels import KernelCall, Segments


class ErrorFeedbackCompressor(WrappingListCompressor):
    """Declares a residual; the inner compressor encodes and decodes."""

    def __init__(self, spec: ErrorFeedback, inner: Compressor | None = None) -> None:
        super().__init__(spec, inner or compressor_for(spec.inner))
        self._decay = spec.decay

    def around(self, inner: Compressor) -> Compressor:
        assert isinstance(self.spec, ErrorFeedback)
        return ErrorFeedbackCompressor(self.spec, inner)

    @property
    def runs_in_c(self) -> bool:
        return self._decay == 1 and super().runs_in_c

    @property
    def batches(self) -> bool:
        return self._decay == 1 and self.inner.batches

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        decay: list[KernelCall] = [("multiply", state[0], self._decay)] if self._decay < 1 and state else []
        return decay + self.inner.encode_calls(src, state, segments, context, payload)

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        return self.inner.decode_calls(payload, segments, dtype, add, dst, context)
