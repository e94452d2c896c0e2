"""Natural compression: a sign and a power of two, one of the two neighbours at random (Horvath et al. 2019).

Law: unbiased. The variance of an element is at most an eighth of its square, as far as the block's 127 powers of two
reach. A block with a NaN or an Inf decodes to NaN throughout, and with error feedback it keeps the residual it had.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core import Natural


class NaturalCompressor(KernelCompressor):
    """Each block counts its powers of two down from its own largest."""

    def __init__(self, spec: Natural) -> None:
        super().__init__(spec, ("natural_encode", spec.block), ("natural_decode", spec.block), random=True)
