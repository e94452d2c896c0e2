"""Deep gradient compression (Lin et al. 2018, algorithm 1): momentum before selection, and momentum factor
masking.

    u = momentum * u + gradient;  v = v + u;  the largest of v are sent, and u and v are cleared there

Law: none of its own; over the steps everything is sent, with momentum. Warm-up is the spec's `at_step`. NaN and Inf travel,
and u and v stay what they were there.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.compressors.topk import indices_checked
from gradwire.core.specs import DGC
from gradwire.kernels import Segments, kernels_for


class DGCCompressor(Compressor):
    """Values in the gradient's own dtype, then their indices. Without state it is the first step's Top-k."""

    encodes_own_part = True  # momentum is in what is decoded, not in the gradient

    def __init__(self, spec: DGC, again: Compressor) -> None:
        super().__init__(spec)
        self.ratio, self.momentum, self.clip, self.again = spec.ratio, spec.momentum, spec.clip, again

    def for_sum(self) -> Compressor:
        """Top-k with its residual: a sum of momenta must not gather momentum again."""
        return self.again

    @property
    def bound(self) -> float:
        """The norm to which a tensor's gradient, as it is given, is cut back: `clip` for each over the root of the ranks."""
        return self.clip / (math.sqrt(self.ranks) * self.ranks)

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        residual, momentum = state or (None, None)
        kernels_for(src.device.type).dgc_encode(
            src, residual, momentum, segments, self.ratio, self.momentum, self.bound, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        with indices_checked(self.spec):
            kernels_for(dst.device.type).topk_decode(payload, segments, dtype, self.ratio, False, add, dst)
