"""Block Top-k: the elements of largest magnitude of every block, with one byte for the place of each in its block.

Law: contractive, of a block at least the part `ratio` of its squared norm is kept. NaN and Inf count as the largest, so of
a block that holds any at least one travels; with error feedback the residual there stays what it was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.compressors.topk import indices_checked
from gradwire.core.specs import BlockTopK
from gradwire.kernels import Segments, kernels_for


class BlockTopKCompressor(Compressor):
    """Values of all blocks in the gradient's own dtype, then their places."""

    def __init__(self, spec: BlockTopK) -> None:
        super().__init__(spec)
        self.ratio, self.block = spec.ratio, spec.block

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).block_topk_encode(
            src, residual_in(state), segments, self.ratio, self.block, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        with indices_checked(self.spec):
            kernels_for(dst.device.type).block_topk_decode(payload, segments, dtype, self.ratio, self.block, add, dst)
