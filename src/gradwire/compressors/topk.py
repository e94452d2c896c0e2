"""Top-k: the elements of largest magnitude, of each tensor or of all that is encoded at once (Aji and Heafield 2017).

Law: contractive: at least the part `ratio` of a group's squared norm is kept. Both selections give the same elements: if too few
elements reach the bound of the sample, all are searched. NaN and Inf count as the largest, so they are sent; with error feedback
their residual stays as it was.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import TopK


class TopKCompressor(KernelCompressor):
    """Values in the gradient's own dtype, then their indices in ascending order."""

    def __init__(self, spec: TopK) -> None:
        settings = spec.ratio, spec.per == "bucket"
        super().__init__(spec, ("topk_encode", *settings, 0.0), ("topk_decode", *settings), typed=True)
