"""Random-k: one element out of each of k stretches of a tensor. Indices are not sent: the decoder draws the same ones.

Law: unbiased without a residual: a sent value is multiplied by the length of its stretch. With error feedback values are not
multiplied, and the residual keeps the unsent elements. A stretch with a NaN or an Inf is sent as NaN, whichever element was
drawn, and its residual stays as it was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor, residual_in
from gradwire.core import RandomK
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
        """The work on one piece: flat holds the gradient before, and the sum after."""
        values = torch.zeros(self.payload_bytes(segments, flat.dtype) // 4, dtype=torch.float32, device=flat.device)
        return RandomKProgram(flat, residual_in(state), segments, self.ratio, values)

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        program = self.program(src, state, segments)
        program.fill(0, context)
        payload.copy_(program.payloads[0].view(torch.uint8))

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        """`context` has the seed and step of the encode, which give the same elements."""
        self.check(payload, segments, dtype)
        values = payload.clone().view(torch.float32)
        kernels_for(dst.device.type).scatter_random(values, segments, context.random, self.ratio, add, dst)


class RandomKProgram:
    """The work on one piece in a step: draw values, and write their sum over ranks to the same places."""

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
