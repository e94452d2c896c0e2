"""Fake compression: the first part of the elements is sent uncompressed, the rest is dropped (CGX, Fig. 1).

Law: contractive, with delta 0. For measurements of a ratio's gain. Training does not work with Truncate, so `unsafe=True` is
required. A NaN or an Inf among the dropped elements is lost.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core import Truncate
from gradwire.errors import SpecError
from gradwire.kernels import Segments


class TruncateCompressor(Compressor):
    """The first 1/ratio of the elements of all segments, in their order. Raises SpecError unless the spec is unsafe."""

    def __init__(self, spec: Truncate) -> None:
        super().__init__(spec)
        if not spec.unsafe:
            raise SpecError(
                f"{spec!r} sends the first elements and always drops the others: a model cannot be trained with Truncate. "
                f"To measure, write Truncate({spec.ratio}, unsafe=True); to train, use TopK or QSGD."
            )
        self.kept = spec.kept

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        residual = residual_in(state)
        for where, sent, to in self._runs(segments, src.element_size()):
            v = src[where] if residual is None else src[where].to(torch.float32) + residual[where]
            value = v.to(src.dtype)
            payload[to].copy_(value[:sent].view(torch.uint8))
            if residual is not None:
                rest = torch.cat([v[:sent] - value[:sent].to(torch.float32), v[sent:]])
                residual[where] = torch.where(value.isfinite(), rest, residual[where])

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        for where, sent, run in self._runs(segments, dtype.itemsize):
            value, to = payload[run].clone().view(dtype), dst[where]
            if add:
                to[:sent].add_(value)
            else:
                to[:sent].copy_(value)
                to[sent:].zero_()

    def _runs(self, segments: Segments, itemsize: int) -> Iterator[tuple[slice, int, slice]]:
        """For each segment: its place in the flat buffer, the number of sent elements, and their place in the payload."""
        left, at = self.kept(segments.numel), 0
        for row in segments.rows:
            sent = min(left, row.numel)
            yield slice(row.offset, row.offset + row.numel), sent, slice(at, at + sent * itemsize)
            left, at = left - sent, at + sent * itemsize
