"""Signs and nothing else: SignSGD, and Signum on a running mean (Bernstein et al. 2018).

Law: none. The result is the vote of the ranks: the owner sums the decoded -1 and 1 of all ranks, with its own, and encodes the
signs of the sum. A tie counts as 1. Without a scale, NaN and Inf cannot be marked: they count by their sign bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, ListCompressor
from gradwire.core import SignSGD, Signum
from gradwire.kernels import KernelCall, Segments


class SignSGDCompressor(ListCompressor):
    """-1 or 1; zero and -0.0 become 1."""

    encodes_own_part = True
    momentum = 0.0

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        return [("sign_encode", src, state[0] if state else None, self.momentum, segments, payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        return [("sign_decode", payload, segments, 0, 0, add, dst)]


class SignumCompressor(SignSGDCompressor):
    """The signs of m = momentum * m + (1 - momentum) * gradient. Without state, the signs of the gradient, since m is zero. An
    element of m that would not be finite keeps its old value."""

    def __init__(self, spec: Signum) -> None:
        super().__init__(spec)
        self.momentum = spec.momentum

    def for_sum(self) -> Compressor:
        """Votes have no momentum."""
        return SignSGDCompressor(SignSGD())
