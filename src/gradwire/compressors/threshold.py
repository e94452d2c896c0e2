"""Threshold: the elements of at least a fixed magnitude; if they do not all fit, the largest.

Law: contractive, with delta 0. Smaller elements are sent as zero. With error feedback the residual keeps them until they grow.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import Threshold


class ThresholdCompressor(KernelCompressor):
    """Top-k of `capacity`. Elements below the threshold are sent as zeros."""

    def __init__(self, spec: Threshold) -> None:
        settings = spec.capacity, False
        super().__init__(spec, ("topk_encode", *settings, spec.threshold), ("topk_decode", *settings), typed=True)
