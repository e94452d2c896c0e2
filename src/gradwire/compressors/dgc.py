"""Deep gradient compression (Lin et al. 2018, algorithm 1): momentum before selection, momentum factor masking.

    u = momentum * u + gradient;  v = v + u;  the largest of v are sent, and u and v are cleared there

Law: none. Over the steps everything is sent, with momentum. Warm-up is the spec's `at_step`. NaN and Inf are sent, and u and v
keep their old values there.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor
from gradwire.core import DGC
from gradwire.kernels import Segments


class DGCCompressor(KernelCompressor):
    """Values in the gradient's own dtype, then their indices. Without state it is the first step's Top-k."""

    encodes_own_part = True  # momentum is in the decoded values, not in the gradient

    def __init__(self, spec: DGC, again: Compressor, ranks: int = 1) -> None:
        """`ranks`: what gradients were divided by."""
        super().__init__(
            spec, ("dgc_encode", spec.ratio, spec.momentum), ("topk_decode", spec.ratio, False), typed=True
        )
        self.clip, self.again, self._of = spec.clip, again, spec
        self._ranks = ranks

    def for_sum(self) -> Compressor:
        """Top-k with its residual: a sum of momenta must not gather momentum again."""
        return self.again

    def summing(self, terms: int, ranks: int) -> Compressor:
        """Option trees encode a rank's own gradient first, so `terms` is 1."""
        return DGCCompressor(self._of, self.again, ranks)

    @property
    def bound(self) -> float:
        """The largest norm of a tensor's gradient after the division by the ranks: `clip` over ranks and their root."""
        return self.clip / (math.sqrt(self._ranks) * self._ranks)

    def encode_with(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> tuple[Any, ...]:
        name, *settings = self.encoder
        return name, src, *(state or (None, None)), segments, *settings, self.bound, payload
