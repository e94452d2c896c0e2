"""QSGD: uniform quantisation with one scale per block (CGX, sections 2.3 and 4; docs/papers/cgx.md).

Law: unbiased with stochastic rounding; with nearest each value is off by at most half a level, which makes max and l2
scales contractive (minmax only from 4 bits on: zero is not one of its levels). Exponential levels (NUQSGD, Ramezani-Kebrya
et al. 2021) halve from the scale on and are as near as the value is small. A block with a NaN or an Inf decodes to NaN
throughout, so a loss scaler sees it; with error feedback such a block keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import QSGD, Spec
from gradwire.kernels import Segments, kernels_for


class QSGDCompressor(Compressor):
    """Bits come from the segments, so tensors of 2 to 8 bits share one call."""

    def __init__(self, spec: QSGD, named: Spec | None = None) -> None:
        """`named` is the spec that messages and sizes go by, where another method is QSGD at these settings."""
        super().__init__(named or spec)
        self.block, self.scale = spec.block, spec.scale
        self.rounding = "nearest" if spec.rounding == "nearest" else "stochastic"
        self.exponential = spec.levels == "exponential"

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels = kernels_for(src.device.type)
        encode = kernels.exponential_encode if self.exponential else kernels.qsgd_encode
        encode(src, residual_in(state), segments, context.random, self.block, self.scale, self.rounding, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels = kernels_for(dst.device.type)
        if self.exponential:
            kernels.exponential_decode(payload, segments, self.block, add, dst)
        else:
            kernels.qsgd_decode(payload, segments, self.block, self.scale, add, dst)
