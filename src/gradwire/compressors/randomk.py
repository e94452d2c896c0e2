"""Random-k: one element out of each of k stretches of a tensor. Indices are not sent: the decoder draws the same ones.

Law: unbiased without a residual: a sent value is multiplied by the length of its stretch. With error feedback values are not
multiplied, and the residual keeps the unsent elements. A stretch with a NaN or an Inf is sent as NaN, whichever element was
drawn, and its residual stays as it was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor, ListCompressor, aligned, residual_in
from gradwire.core import RandomK
from gradwire.kernels import KernelCall, Segments, run_calls


def randomk_compressor(spec: RandomK) -> Compressor:
    """The compressor of elements that all ranks draw alike, or each rank for itself."""
    return CommonRandomKCompressor(spec) if spec.indices == "common" else KernelCompressor(spec)


class CommonRandomKCompressor(ListCompressor):
    """All ranks draw the same elements in a step, by seed and step number, so float32 values are summed on the wire."""

    runs_in_c = False  # payloads are summed, not gathered

    def __init__(self, spec: RandomK) -> None:
        super().__init__(spec)
        self.ratio = spec.ratio

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> "RandomKProgram":
        """The work on one piece: flat holds the gradient before, and the sum after."""
        return RandomKProgram(self, flat, state, segments)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        values = torch.empty(payload.numel() // 4, dtype=torch.float32, device=src.device)
        return [
            ("gather_random", src, residual_in(state), segments, context.random, self.ratio, values),
            ("copy_into", payload, values.view(torch.uint8)),
        ]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        """`context` has the seed and step of the encode, which give the same elements."""
        self.check(payload, segments, dtype)
        values, copies = aligned(payload, torch.float32)
        return [*copies, ("scatter_random", values, segments, context.random, self.ratio, add, dst)]


class RandomKProgram:
    """The work on one piece in a step: draw values, and write their sum over ranks to the same places."""

    def __init__(self, compressor: CommonRandomKCompressor, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> None:
        self.flat, self.residual, self.segments, self.ratio = flat, residual_in(state), segments, compressor.ratio
        numel = compressor.payload_bytes(segments, flat.dtype) // 4
        self.payloads = [torch.zeros(numel, dtype=torch.float32, device=flat.device)]
        self.shared: dict[str, Tensor] = {}

    def fill(self, round_number: int, context: Context) -> None:
        """Write the values drawn to the payload."""
        settings = self.segments, context.random, self.ratio
        run_calls([("gather_random", self.flat, self.residual, *settings, *self.payloads)])

    def finish(self, context: Context) -> None:
        """Write the sum to the flat buffer: zeros where nothing was drawn."""
        settings = self.segments, context.random, self.ratio
        run_calls([("scatter_random", *self.payloads, *settings, False, self.flat)])
