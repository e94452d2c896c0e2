"""Top-k: the elements of largest magnitude, of each tensor or of all that is encoded at once (Aji and Heafield 2017).

Law: contractive: at least the part `ratio` of a group's squared norm is kept. Both selections give the same elements: if too few
elements reach the bound of the sample, all are searched. NaN and Inf count as the largest, so they are sent; with error feedback
their residual stays as it was. With `values` what is kept is encoded once more: the law is that of both, one after the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, KernelCompressor, refused
from gradwire.core import TopK, kept_of
from gradwire.kernels import Segment, Segments, kernels_for


class TopKCompressor(KernelCompressor):
    """Values in the gradient's own dtype, then their indices in ascending order."""

    def __init__(self, spec: TopK) -> None:
        settings = spec.ratio, spec.per == "bucket"
        super().__init__(spec, ("topk_encode", *settings, 0.0), ("topk_decode", *settings), typed=True)


class CodedTopKCompressor(Compressor):
    """The values as another compressor encodes them, then their indices."""

    def __init__(self, spec: TopK, values: Compressor) -> None:
        super().__init__(spec)
        self._ratio, self._together = spec.ratio, spec.per == "bucket"
        self._plain, self._values = TopKCompressor(TopK(spec.ratio, spec.selection, spec.per)), values

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        found = torch.empty(self._plain.payload_bytes(segments, src.dtype), dtype=torch.uint8, device=src.device)
        self._plain.encode(src, state, segments, context, found)
        kept = self._kept(segments)
        size = kept.numel * src.element_size()
        values, indices = found[:size].view(src.dtype), found[size:]
        codes = payload[: payload.numel() - indices.numel()]
        payload[codes.numel() :].copy_(indices)
        if not state:
            self._values.encode(values, (), kept, context, codes)
            return
        error = values.to(torch.float32, copy=True)
        self._values.encode(torch.zeros_like(values), [error], kept, context, codes)
        error.nan_to_num_(0.0, 0.0, 0.0)  # the residual of such an element stayed as it was
        self._scatter(error, indices, segments, True, state[0])

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        kept = self._kept(segments)
        size = self._values.payload_bytes(kept, dtype)
        values = torch.empty(kept.numel, dtype=torch.float32, device=dst.device)
        self._values.decode(payload[:size], kept, dtype, False, values, context)
        with refused(self.spec):
            self._scatter(values, payload[size:], segments, add, dst)

    def _scatter(self, values: Tensor, indices: Tensor, segments: Segments, add: bool, dst: Tensor) -> None:
        """Write these float32 values to the elements of these indices, or add them."""
        found = torch.cat([values.view(torch.uint8), indices])
        kernels_for(dst.device.type).topk_decode(found, segments, values.dtype, self._ratio, self._together, add, dst)

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
