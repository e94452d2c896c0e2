"""Signs with their mean magnitudes: EF-SignSGD (Karimireddy et al. 2019) and OneBit (Seide et al. 2014).

Law: contractive. Every element comes back as the mean of the elements it shares it with, so the error never is larger than
what was to be sent; the bfloat16 of the mean does not change that. What is lost stays in the residual. A block with a NaN
or an Inf decodes to NaN throughout, and keeps the residual it had.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import EFSignSGD, OneBit


class MeanSignCompressor(KernelCompressor):
    """One mean magnitude a block, or for OneBit two means: of the elements of at least zero, and of those below."""

    def __init__(self, spec: EFSignSGD | OneBit) -> None:
        super().__init__(spec, ("mean_sign_encode", spec.block, spec.scales), ("sign_decode", spec.block, spec.scales))
