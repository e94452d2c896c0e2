"""Int8: 255 levels between minus and plus each block's largest magnitude, rounded to nearest.

Law: contractive. It is QSGD with 8 bits, scale 'max' and rounding to nearest, and runs its kernel.
"""

from collections.abc import Sequence

import torch

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import Int8
from gradwire.kernels import Segments, kernels_for

__all__ = ["Int8Compressor"]


class Int8Compressor(Compressor):
    """The segments say 8 bits, as the spec does."""

    def __init__(self, spec: Int8) -> None:
        super().__init__(spec)
        self.block = spec.block

    def encode(
        self,
        src: torch.Tensor,
        state: Sequence[torch.Tensor],
        segments: Segments,
        context: Context,
        payload: torch.Tensor,
    ) -> None:
        kernels_for(src.device.type).qsgd_encode(
            src, residual_in(state), segments, context.random, self.block, "max", "nearest", payload
        )

    def decode(
        self,
        payload: torch.Tensor,
        segments: Segments,
        dtype: torch.dtype,
        add: bool,
        dst: torch.Tensor,
        context: Context,
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).qsgd_decode(payload, segments, self.block, "max", add, dst)
