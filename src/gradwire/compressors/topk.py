"""Top-k: the elements of largest magnitude, of each tensor or of all that is encoded at once (Aji and Heafield 2017).

Law: contractive, of a group at least the part `ratio` of its squared norm is kept. Both selections give the same elements
here: a bound found on a sample is used where enough elements reach it, and these hold the largest; else all are searched.
NaN and Inf count as the largest, so they travel; with error feedback the residual there stays what it was.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core.specs import TopK


class TopKCompressor(KernelCompressor):
    """Values in the gradient's own dtype, then their indices in ascending order."""

    def __init__(self, spec: TopK) -> None:
        settings = spec.ratio, spec.per == "bucket"
        super().__init__(spec, ("topk_encode", *settings, 0.0), ("topk_decode", *settings), typed=True)
