"""2-bit threshold quantisation with its residual (MXNet's, CD-SGD's; docs/papers/cd-sgd.md).

Law: contractive. A sent value is at most as large as the element, so the error is never larger than the input. NaN and Inf decode
to NaN and keep their residual; if blocks have their own thresholds, so does the whole block.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import TwoBit


class TwoBitCompressor(KernelCompressor):
    """Plus or minus the threshold, or zero."""

    def __init__(self, spec: TwoBit) -> None:
        settings = spec.block, spec.threshold
        super().__init__(spec, ("threshold_encode", *settings, spec.multiple), ("threshold_decode", *settings))
