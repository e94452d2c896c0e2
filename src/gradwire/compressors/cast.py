"""A narrower float on the wire (float16 or bfloat16). Law: contractive, relative error at most 2^-11 or 2^-8."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Context, ListCompressor, residual_in
from gradwire.core import Cast
from gradwire.kernels import KernelCall, Segments


class CastCompressor(ListCompressor):
    """Rounds to nearest even. Beyond float16's 65504 a value becomes Inf, as in torch's own fp16 hook."""

    def __init__(self, spec: Cast) -> None:
        super().__init__(spec)
        self.wire: torch.dtype = getattr(torch, spec.dtype)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        return [("cast_encode", src, residual_in(state), self.wire, payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        return [("cast_decode", payload, self.wire, add, dst)]
