"""Fake compression: the first part of the elements is sent uncompressed, the rest is dropped (CGX, Fig. 1).

Law: contractive, with delta 0. For measurements of a ratio's gain. Training does not work with Truncate, so `unsafe=True` is
required. A NaN or an Inf among the dropped elements is lost.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Context, ListCompressor, residual_in
from gradwire.core import Truncate
from gradwire.errors import SpecError
from gradwire.kernels import KernelCall, Segments


class TruncateCompressor(ListCompressor):
    """The first 1/ratio of the elements of all segments, in their order. Raises SpecError unless the spec is unsafe."""

    runs_in_c = False  # C++ has no such kernel

    def __init__(self, spec: Truncate) -> None:
        super().__init__(spec)
        if not spec.unsafe:
            raise SpecError(
                f"{spec!r} sends the first elements and always drops the others: a model cannot be trained with Truncate. "
                f"To measure, write Truncate({spec.ratio}, unsafe=True); to train, use TopK or QSGD."
            )
        self._kept = spec.kept

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        return [("truncate_encode", src, residual_in(state), segments, self._kept(segments.numel), payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        return [("truncate_decode", payload, segments, dtype, self._kept(segments.numel), add, dst)]
