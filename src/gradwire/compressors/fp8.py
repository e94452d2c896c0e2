"""FP8: an 8-bit float on the wire with one scale per block, which brings the block's largest magnitude to the format's.

Law: contractive. Numbers that are normal in the format are off by at most 1/16 (e4m3) or 1/8 (e5m2) of themselves, the
others by half of its smallest number. A block with a NaN or an Inf decodes to NaN throughout, and with error feedback it
keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import FP8
from gradwire.kernels import Segments, kernels_for


class FP8Compressor(Compressor):
    """Rounds to nearest even, as torch's casts do."""

    def __init__(self, spec: FP8) -> None:
        super().__init__(spec)
        self.format, self.block = spec.format, spec.block

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).fp8_encode(src, residual_in(state), segments, self.block, self.format, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).fp8_decode(payload, segments, self.block, self.format, add, dst)
