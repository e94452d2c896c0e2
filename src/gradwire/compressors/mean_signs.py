"""Signs with their mean magnitudes: EF-SignSGD (Karimireddy et al. 2019) and OneBit (Seide et al. 2014).

Law: contractive. Every element becomes a mean of elements, so the error is never larger than the input, even with the mean in
bfloat16. The residual keeps the error. A block with a NaN or an Inf decodes to NaN throughout and keeps its residual.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core import EFSignSGD, OneBit


class MeanSignCompressor(KernelCompressor):
    """One mean magnitude a block, or for OneBit two means: of the elements of at least zero, and of those below."""

    def __init__(self, spec: EFSignSGD | OneBit) -> None:
        super().__init__(spec, ("mean_sign_encode", spec.block, spec.scales), ("sign_decode", spec.block, spec.scales))
