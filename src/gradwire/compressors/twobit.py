"""2-bit threshold quantisation with its residual (MXNet's, CD-SGD's; docs/papers/cd-sgd.md).

Law: contractive. What is sent of an element is at most its magnitude, so the error never is larger than what was to be
sent, whatever the threshold. What is not finite decodes to NaN, with its whole block where the threshold follows the
blocks, and keeps the residual it had.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import TwoBit
from gradwire.kernels import Segments, kernels_for


class TwoBitCompressor(Compressor):
    """Plus or minus the threshold, or zero."""

    def __init__(self, spec: TwoBit) -> None:
        super().__init__(spec)
        self.block, self.threshold, self.multiple = spec.block, spec.threshold, spec.multiple

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).threshold_encode(
            src, residual_in(state), segments, self.block, self.threshold, self.multiple, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kernels_for(dst.device.type).threshold_decode(payload, segments, self.block, self.threshold, add, dst)
