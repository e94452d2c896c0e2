"""2-bit threshold quantisation with its residual (MXNet's, CD-SGD's; docs/papers/cd-sgd.md).

Law: contractive. A sent value is at most as large as the element, so the error is never larger than the input. NaN and Inf decode
to NaN and keep their residual; if blocks have their own thresholds, so does the whole block.
"""

from gradwire.compressors.base import Compressor, KernelCompressor
from gradwire.core import TwoBit


class TwoBitCompressor(KernelCompressor):
    """Plus or minus the threshold, or zero."""

    def __init__(self, spec: TwoBit, part: float = 1.0) -> None:
        """`part`: what gradients were multiplied by, and a fixed threshold is."""
        settings = spec.block, spec.threshold * part
        super().__init__(spec, ("threshold_encode", *settings, spec.multiple), ("threshold_decode", *settings))
        self._of = spec

    def for_sum(self) -> Compressor:
        return TwoBitCompressor(self._of)

    def summing(self, terms: int, ranks: int) -> Compressor:
        return TwoBitCompressor(self._of, terms / ranks)
