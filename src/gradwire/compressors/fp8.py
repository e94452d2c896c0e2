"""FP8: an 8-bit float on the wire with one scale per block, which brings the block's largest magnitude to the format's.

Law: contractive. Numbers that are normal in the format are off by at most 1/16 (e4m3) or 1/8 (e5m2) of themselves, the
others by half of its smallest number. A block with a NaN or an Inf decodes to NaN throughout, and with error feedback it
keeps the residual it had.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core import FP8


class FP8Compressor(KernelCompressor):
    """Rounds to nearest even, as torch's casts do."""

    def __init__(self, spec: FP8) -> None:
        super().__init__(spec, ("fp8_encode", spec.block, spec.format), ("fp8_decode", spec.block, spec.format))
