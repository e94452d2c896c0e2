"""TernGrad: minus the scale, zero or the scale (Wen et al. 2017).

Law: unbiased without clipping, when it is QSGD with 2 bits and the payload is QSGD's too; none with it.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core import TernGrad


class TernGradCompressor(KernelCompressor):
    """A block with a NaN or an Inf decodes to NaN throughout; with error feedback it keeps the residual it had."""

    def __init__(self, spec: TernGrad) -> None:
        clipped, unclipped = (
            ("terngrad_encode", spec.block, spec.clip),
            ("qsgd_encode", spec.block, "max", "stochastic"),
        )
        super().__init__(spec, clipped if spec.clip else unclipped, ("qsgd_decode", spec.block, "max"), random=True)
