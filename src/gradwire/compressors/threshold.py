"""Threshold: the elements of at least a fixed magnitude; if they do not all fit, the largest.

Law: contractive, with delta 0. Smaller elements are sent as zero. With error feedback the residual keeps them until they grow.
"""

from gradwire.compressors.base import Compressor, KernelCompressor
from gradwire.core import Threshold


class ThresholdCompressor(KernelCompressor):
    """Top-k of `capacity`. Elements below the threshold are sent as zeros."""

    def __init__(self, spec: Threshold, part: float = 1.0) -> None:
        """`part`: what gradients were multiplied by, and the threshold is."""
        settings = spec.capacity, False
        encoder = ("topk_encode", *settings, spec.threshold * part)
        super().__init__(spec, encoder, ("topk_decode", *settings), typed=True)
        self._of = spec

    def for_sum(self) -> Compressor:
        return ThresholdCompressor(self._of)

    def summing(self, terms: int, ranks: int) -> Compressor:
        return ThresholdCompressor(self._of, terms / ranks)
