"""Deep gradient compression (Lin et al. 2018, algorithm 1): momentum before selection, momentum factor masking.

    u = momentum * u + gradient;  v = v + u;  the largest of v are sent, and u and v are cleared there

Law: none. Over the steps everything is sent, with momentum. Warm-up is the spec's `at_step`. NaN and Inf are sent, and u and v
keep their old values there.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, ListCompressor
from gradwire.compressors.registry import compressor_for
from gradwire.core import DGC, ErrorFeedback, TopK
from gradwire.kernels import KernelCall, Segments


class DGCCompressor(ListCompressor):
    """Values in the gradient's own dtype, then their indices. Without state it is the first step's Top-k."""

    encodes_own_part = True  # momentum is in the decoded values, not in the gradient

    def __init__(self, spec: DGC, ranks: int = 1) -> None:
        """`ranks`: what gradients were divided by."""
        super().__init__(spec)
        self._dgc, self._ranks = spec, ranks

    @cached_property
    def _again(self) -> Compressor:
        return compressor_for(ErrorFeedback(TopK(self._dgc.ratio, self._dgc.selection)))

    def for_sum(self) -> Compressor:
        """Top-k with its residual: a sum of momenta must not gather momentum again."""
        return self._again

    def summing(self, terms: int, ranks: int) -> Compressor:
        """Option trees encode a rank's own gradient first, so `terms` is 1."""
        return DGCCompressor(self._dgc, ranks)

    @property
    def bound(self) -> float:
        """The largest norm of a tensor's gradient after the division by the ranks: `clip` over ranks and their root."""
        return self._dgc.clip / (math.sqrt(self._ranks) * self._ranks)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        settings = self._dgc.ratio, self._dgc.momentum, self.bound
        return [("dgc_encode", src, *(state or (None, None)), segments, *settings, payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        return [("topk_decode", payload, segments, dtype, self._dgc.ratio, False, add, dst)]
