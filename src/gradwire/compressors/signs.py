"""Signs and nothing else: SignSGD, and Signum on a running mean (Bernstein et al. 2018).

Law: none. What comes back is the vote of the ranks: who adds up sums the decoded -1 and 1 of all, the own ones too, and
encodes the signs of that sum, in which a tie counts as 1. There is no scale that could say that something is not finite:
such an element counts by its sign bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.core.specs import SignSGD, Signum
from gradwire.kernels import Segments, kernels_for


class SignSGDCompressor(Compressor):
    """-1 or 1; zero and -0.0 become 1."""

    encodes_own_part = True

    def __init__(self, spec: SignSGD | Signum) -> None:
        super().__init__(spec)
        self.keep = 0.0

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        momentum = state[0] if state else None
        kernels_for(src.device.type).sign_encode(src, momentum, self.keep, segments, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).sign_decode(payload, segments, 0, 0, add, dst)


class SignumCompressor(SignSGDCompressor):
    """The signs of m = momentum * m + (1 - momentum) * gradient. Without a place for m: those of the gradient, since m
    was zero. An element of m that would not be finite stays what it was."""

    def __init__(self, spec: Signum) -> None:
        super().__init__(spec)
        self.keep = spec.momentum

    def for_sum(self) -> Compressor:
        """Votes have no momentum."""
        return SignSGDCompressor(SignSGD())
