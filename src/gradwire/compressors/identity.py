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
        value = _as_dtype(payload, dtype)
        if add:
            dst.add_(value)
        else:
            dst.copy_(value)


def _as_dtype(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as numbers; a payload that does not begin at a multiple of the item size is copied first."""
    aligned = payload.storage_offset() % dtype.itemsize == 0
    return (payload if aligned else payload.clone()).view(dtype)
