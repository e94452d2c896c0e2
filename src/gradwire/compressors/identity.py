"""No compression: the payload is the gradient's own bytes. Law: exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Context, ListCompressor, aligned
from gradwire.kernels import KernelCall, Segments


class IdentityCompressor(ListCompressor):
    """Copies bytes."""

    runs_in_c = False  # C++ does not know all dtypes

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        return [("copy_into", payload, src.view(torch.uint8))]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        values, copies = aligned(payload, dtype)
        return [*copies, ("add_into" if add else "copy_into", dst, values)]
