"""Threshold: the elements of at least a fixed magnitude, the largest first where there are more than there is room for.

Law: contractive, by nothing if no element reaches the threshold. What is smaller travels as zero and, with error feedback,
stays in the residual until it has grown.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import Threshold


class ThresholdCompressor(KernelCompressor):
    """Top-k of as many elements as there is room for. Elements below the threshold are sent as zeros."""

    def __init__(self, spec: Threshold) -> None:
        settings = spec.capacity, False
        super().__init__(spec, ("topk_encode", *settings, spec.threshold), ("topk_decode", *settings), typed=True)
