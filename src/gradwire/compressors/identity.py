"""No compression: the payload is the gradient's own bytes. Law: exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.kernels import Segments


class IdentityCompressor(Compressor):
    """Copies bytes."""

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        payload.copy_(src.view(torch.uint8))

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        aligned = payload.storage_offset() % dtype.itemsize == 0  # else the bytes are copied before they are numbers
        value = (payload if aligned else payload.clone()).view(dtype)
        if add:
            dst.add_(value)
        else:
            dst.copy_(value)
