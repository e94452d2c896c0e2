"""Top-k with encoded values: the elements of largest magnitude, whose values another compressor encodes (Sarfi et al. 2025).

Law: that of the selection (`TopK.kernels`) and that of the values, one after the other. Both selections give the same elements:
if too few elements reach the bound of the sample, all are searched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor, WrappingListCompressor
from gradwire.compressors.registry import compressor_for
from gradwire.core import TopK, kept_of
from gradwire.kernels import KernelCall, Segment, Segments


def topk_compressor(spec: TopK) -> Compressor:
    """The compressor of the largest elements, with their values encoded or in the gradient's own dtype."""
    return CodedTopKCompressor(spec) if spec.values.encodes else KernelCompressor(spec)


class CodedTopKCompressor(WrappingListCompressor):
    """The values as another compressor encodes them, `inner`, then their indices."""

    runs_in_c = False  # the lists would keep memory for the values of every payload

    def __init__(self, spec: TopK, inner: Compressor | None = None) -> None:
        super().__init__(spec, inner or compressor_for(spec.values))
        self._ratio, self._together = spec.ratio, spec.per == "bucket"
        self._plain = KernelCompressor(TopK(spec.ratio, spec.selection, spec.per))

    def around(self, inner: Compressor) -> Compressor:
        assert isinstance(self.spec, TopK)
        return CodedTopKCompressor(self.spec, inner)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        found = torch.empty(self._plain.payload_bytes(segments, src.dtype), dtype=torch.uint8, device=src.device)
        kept = self._kept(segments)
        size = kept.numel * src.element_size()
        values, indices = found[:size].view(src.dtype), found[size:]
        codes = payload[: payload.numel() - indices.numel()]
        calls = self._plain.encode_calls(src, state, segments, context, found)
        calls.append(("copy_into", payload[codes.numel() :], indices))
        if not state:
            return calls + self.inner.encode_calls(values, (), kept, context, codes)
        error, scatter = self._scatter(indices, kept, segments, True, state[0])
        return [
            *calls,
            ("copy_into", error, values),
            *self.inner.encode_calls(torch.zeros_like(values), [error], kept, context, codes),
            ("zero_nonfinite", error),  # the residual of such an element stayed as it was
            *scatter,
        ]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        kept = self._kept(segments)
        size = self.inner.payload_bytes(kept, dtype)
        values, scatter = self._scatter(payload[size:], kept, segments, add, dst)
        return [*self.inner.decode_calls(payload[:size], kept, dtype, False, values, context), *scatter]

    def _scatter(
        self, indices: Tensor, kept: Segments, segments: Segments, add: bool, dst: Tensor
    ) -> tuple[Tensor, list[KernelCall]]:
        """Memory for float32 values, and the calls that write them to the elements of these indices, or add them."""
        size = kept.numel * torch.float32.itemsize
        found = torch.empty(size + indices.numel(), dtype=torch.uint8, device=dst.device)
        settings = torch.float32, self._ratio, self._together
        return found[:size].view(torch.float32), [
            ("copy_into", found[size:], indices),
            ("topk_decode", found, segments, *settings, add, dst),
        ]

    def _kept(self, segments: Segments) -> Segments:
        """The values of all groups, one after another."""
        if (found := segments.launches.get(self.spec)) is None:
            rows, at = [], 0
            for group in [segments.rows] if self._together and segments.rows else [[row] for row in segments.rows]:
                count = kept_of(sum(row.numel for row in group), self._ratio)
                rows.append(Segment(at, count, group[0].key, 0, group[0].bits))
                at += count
            found = segments.launches[self.spec] = Segments(tuple(rows), segments.device)
        assert isinstance(found, Segments)
        return found
