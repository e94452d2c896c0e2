"""A narrower float on the wire (float16 or bfloat16). Law: contractive, relative error at most 2^-11 or 2^-8."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import Cast
from gradwire.kernels import Segments, kernels_for


class CastCompressor(Compressor):
    """Rounds to nearest even. Beyond float16's 65504 a value becomes Inf, as in torch's own fp16 hook."""

    def __init__(self, spec: Cast) -> None:
        super().__init__(spec)
        self.wire: torch.dtype = getattr(torch, spec.dtype)

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).cast_encode(src, residual_in(state), self.wire, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).cast_decode(payload, self.wire, add, dst)
