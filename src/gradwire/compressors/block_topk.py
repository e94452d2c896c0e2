"""Block Top-k: the elements of largest magnitude of every block, with one byte for the place of each in its block.

Law: contractive, of a block at least the part `ratio` of its squared norm is kept. NaN and Inf count as the largest, so of
a block that holds any at least one travels; with error feedback the residual there stays what it was.
"""

from gradwire.compressors.base import KernelCompressor
from gradwire.core import BlockTopK


class BlockTopKCompressor(KernelCompressor):
    """Values of all blocks in the gradient's own dtype, then their places."""

    def __init__(self, spec: BlockTopK) -> None:
        settings = spec.ratio, spec.block
        super().__init__(spec, ("block_topk_encode", *settings), ("block_topk_decode", *settings), typed=True)
