"""Error feedback around any compressor: what an encode loses is added to the next.

Law: telescoping. The sum over steps of what was sent equals the sum of what was given, less the last residual.
The residual belongs to the caller, one for each encode of the option; the inner compressor's kernel updates it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.core.specs import ErrorFeedback
from gradwire.kernels import Segments


class ErrorFeedbackCompressor(Compressor):
    """Only declares that a residual is wanted; encode and decode are the inner compressor's."""

    def __init__(self, spec: ErrorFeedback, inner: Compressor) -> None:
        super().__init__(spec)
        self.inner = inner

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> Any:
        """What a codec does whose payloads are summed on the wire."""
        return self.inner.program(flat, state, segments)  # type: ignore[attr-defined]  # its spec has rounds

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        self.inner.encode(src, state, segments, context, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.inner.decode(payload, segments, dtype, add, dst, context)
