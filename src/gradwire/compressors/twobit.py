"""2-bit threshold quantisation with its residual (MXNet's, CD-SGD's; docs/papers/cd-sgd.md).

Law: contractive. What is sent of an element is at most its magnitude, so the error never is larger than what was to be
sent, whatever the threshold. What is not finite decodes to NaN, with its whole block where the threshold follows the
blocks, and keeps the residual it had.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import TwoBit


class TwoBitCompressor(KernelCompressor):
    """Plus or minus the threshold, or zero."""

    def __init__(self, spec: TwoBit) -> None:
        settings = spec.block, spec.threshold
        super().__init__(spec, ("threshold_encode", *settings, spec.multiple), ("threshold_decode", *settings))
