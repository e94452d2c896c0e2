"""QSGD: uniform quantisation with one scale per block (CGX, sections 2.3 and 4; docs/papers/cgx.md).

Law: unbiased with stochastic rounding; with nearest each value is off by at most half a level, which makes max and l2
scales contractive (minmax only from 4 bits on: zero is not one of its levels). Exponential levels (NUQSGD, Ramezani-Kebrya
et al. 2021) halve from the scale on and are as near as the value is small. A block with a NaN or an Inf decodes to NaN
throughout, so a loss scaler sees it; with error feedback such a block keeps the residual it had. With blocks="bucket" the
kernels see the tensors of a bucket as one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.base import Context, KernelCompressor
from gradwire.core import QSGD, Int8
from gradwire.kernels import Segments


class QSGDCompressor(KernelCompressor):
    """The segments say how many bits an element has, so tensors of 2 to 8 bits share one call."""

    def __init__(self, spec: QSGD) -> None:
        settings = spec.block, spec.scale
        rounding = "nearest" if spec.rounding == "nearest" else "stochastic"
        levels = "exponential" if spec.levels == "exponential" else "qsgd"
        decoded = (spec.block,) if spec.levels == "exponential" else settings
        super().__init__(spec, (f"{levels}_encode", *settings, rounding), (f"{levels}_decode", *decoded), random=True)
        self._joins = spec.blocks == "bucket"

    def encode_with(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> tuple[Any, ...]:
        return super().encode_with(src, state, segments.joined if self._joins else segments, context, payload)

    def decode_with(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor
    ) -> tuple[Any, ...]:
        return super().decode_with(payload, segments.joined if self._joins else segments, dtype, add, dst)


class Int8Compressor(KernelCompressor):
    """QSGD with 8 bits, rounded to nearest."""

    def __init__(self, spec: Int8) -> None:
        settings = spec.block, "max"
        super().__init__(spec, ("qsgd_encode", *settings, "nearest"), ("qsgd_decode", *settings), random=True)
