"""Threshold: the elements of at least a fixed magnitude, the largest first where there are more than there is room for.

Law: contractive, by nothing if no element reaches the threshold. What is smaller travels as zero and, with error feedback,
stays in the residual until it has grown.
"""

from gradwire.compressors.base import Compressor
from gradwire.compressors.topk import TopKCompressor
from gradwire.core.specs import Threshold


class ThresholdCompressor(TopKCompressor):
    """Top-k of as many elements as there is room for, of which the small ones are sent as zeros."""

    def __init__(self, spec: Threshold) -> None:
        Compressor.__init__(self, spec)
        self.ratio, self.together, self.threshold = spec.capacity, False, spec.threshold
