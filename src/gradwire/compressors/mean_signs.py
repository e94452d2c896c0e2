"""Signs with their mean magnitudes: EF-SignSGD (Karimireddy et al. 2019) and OneBit (Seide et al. 2014).

Law: contractive. Every element comes back as the mean of the elements it shares it with, so the error never is larger than
what was to be sent; the bfloat16 of the mean does not change that. What is lost stays in the residual. A block with a NaN
or an Inf decodes to NaN throughout, and keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import EFSignSGD, OneBit
from gradwire.kernels import Segments, kernels_for


class MeanSignCompressor(Compressor):
    """One mean magnitude a block, or for OneBit two means: of what is at least zero, and of what is below."""

    def __init__(self, spec: EFSignSGD | OneBit) -> None:
        super().__init__(spec)
        self.block, self.means = spec.block, 2 if isinstance(spec, OneBit) else 1

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).mean_sign_encode(
            src, residual_in(state), segments, self.block, self.means, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).sign_decode(payload, segments, self.block, self.means, add, dst)
