"""TernGrad: minus the scale, zero or the scale (Wen et al. 2017).

Law: unbiased without clipping, when it is QSGD with 2 bits and the payload is QSGD's too; none with it.
"""

from collections.abc import Sequence

from torch import Tensor

from gradwire.compressors.base import Context, residual_in
from gradwire.compressors.qsgd import QSGDCompressor
from gradwire.core.specs import QSGD, TernGrad
from gradwire.kernels import Segments, kernels_for


class TernGradCompressor(QSGDCompressor):
    """A block with a NaN or an Inf decodes to NaN throughout; with error feedback it keeps the residual it had."""

    def __init__(self, spec: TernGrad) -> None:
        super().__init__(QSGD(bits=2, block=spec.block, seed=spec.seed), spec)
        self.clip = spec.clip

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        if not self.clip:
            return super().encode(src, state, segments, context, payload)
        kernels_for(src.device.type).terngrad_encode(
            src, residual_in(state), segments, context.random, self.block, self.clip, payload
        )
