"""Random-k: one element out of each of k stretches of a tensor. No index travels: they are drawn again.

Law: unbiased without a residual, since what is sent is multiplied by the length of its stretch; with error feedback it is
not multiplied, and what was not sent stays in the residual. A stretch that holds a NaN or an Inf is sent as NaN, whichever
element was drawn, and keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor, residual_in
from gradwire.core.specs import RandomK
from gradwire.kernels import Segments, kernels_for


class OwnRandomKCompressor(KernelCompressor):
    """Each rank draws its own: the key of its random stream travels before the values, in the gradient's own dtype."""

    def __init__(self, spec: RandomK) -> None:
        super().__init__(spec, ("randomk_encode", spec.ratio), ("randomk_decode", spec.ratio), random=True, typed=True)


class CommonRandomKCompressor(Compressor):
    """All ranks draw the same elements in a step, by seed and step number, so float32 values are summed on the wire."""

    def __init__(self, spec: RandomK) -> None:
        super().__init__(spec)
        self.ratio = spec.ratio

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> "RandomKProgram":
        """What one piece does in its round: flat holds the gradient before, the sum after."""
        values = torch.zeros(self.payload_bytes(segments, flat.dtype) // 4, dtype=torch.float32, device=flat.device)
        return RandomKProgram(flat, residual_in(state), segments, self.ratio, values)

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        values = torch.empty(payload.numel() // 4, dtype=torch.float32, device=src.device)
        kernels_for(src.device.type).gather_random(
            src, residual_in(state), segments, context.random, self.ratio, values
        )
        payload.copy_(values.view(torch.uint8))

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        """`context` has the seed and step of the encode: they say which elements these are."""
        self.check(payload, segments, dtype)
        values = payload.clone().view(torch.float32)
        kernels_for(dst.device.type).scatter_random(values, segments, context.random, self.ratio, add, dst)


class RandomKProgram:
    """One piece's work in a step: draw, be summed with the other ranks', write where it was drawn."""

    def __init__(self, flat: Tensor, residual: Tensor | None, segments: Segments, ratio: float, values: Tensor) -> None:
        self.flat, self.residual, self.segments, self.ratio = flat, residual, segments, ratio
        self.payloads, self.kernels = [values], kernels_for(flat.device.type)
        self.shared: dict[str, Tensor] = {}

    def fill(self, round_number: int, context: Context) -> None:
        """Write the values drawn to the payload."""
        self.kernels.gather_random(
            self.flat, self.residual, self.segments, context.random, self.ratio, self.payloads[0]
        )

    def finish(self, context: Context) -> None:
        """Write the sum to the flat buffer: zeros where nothing was drawn."""
        self.kernels.scatter_random(self.payloads[0], self.segments, context.random, self.ratio, False, self.flat)
