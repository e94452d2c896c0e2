"""Natural compression: a sign and a power of two, one of the two neighbours at random (Horvath et al. 2019).

Law: unbiased. The variance of an element is at most an eighth of its square, as far as the block's 127 powers of two
reach. A block with a NaN or an Inf decodes to NaN throughout, and with error feedback it keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import Natural
from gradwire.kernels import Segments, kernels_for


class NaturalCompressor(Compressor):
    """Each block counts its powers of two down from its own largest."""

    def __init__(self, spec: Natural) -> None:
        super().__init__(spec)
        self.block = spec.block

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).natural_encode(
            src, residual_in(state), segments, context.random, self.block, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).natural_decode(payload, segments, self.block, add, dst)
