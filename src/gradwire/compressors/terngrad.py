"""TernGrad: minus the scale, zero or the scale (Wen et al. 2017).

Law: unbiased without clipping, when it is QSGD with 2 bits and the payload is QSGD's too; none with it.
"""

from collections.abc import Sequence

import torch

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import TernGrad
from gradwire.kernels import Segments, kernels_for

__all__ = ["TernGradCompressor"]


class TernGradCompressor(Compressor):
    """A block with a NaN or an Inf decodes to NaN throughout; with error feedback it keeps the residual it had."""

    def __init__(self, spec: TernGrad) -> None:
        super().__init__(spec)
        self.block, self.clip = spec.block, spec.clip

    def encode(
        self,
        src: torch.Tensor,
        state: Sequence[torch.Tensor],
        segments: Segments,
        context: Context,
        payload: torch.Tensor,
    ) -> None:
        kernels, residual = kernels_for(src.device.type), residual_in(state)
        if self.clip:
            kernels.terngrad_encode(src, residual, segments, context.random, self.block, self.clip, payload)
        else:
            kernels.qsgd_encode(src, residual, segments, context.random, self.block, "max", "stochastic", payload)

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
