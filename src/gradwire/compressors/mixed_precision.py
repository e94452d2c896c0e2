"""Payloads that hold uncompressed tensors next to compressed ones. Law: the compressor's; exact for uncompressed tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, WrappingListCompressor, aligned
from gradwire.core import RAW
from gradwire.kernels import KernelCall, Segments


class BesideCompressor(WrappingListCompressor):
    """Segments with `bits` RAW travel as they are, behind the payload of the inner compressor, from a multiple of 16 bytes on."""

    def __init__(self, inner: Compressor) -> None:
        super().__init__(inner.spec, inner)

    def around(self, inner: Compressor) -> Compressor:
        return BesideCompressor(inner)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        (coded, raw), calls, size = _parts_of(segments), list[KernelCall](), 0
        if coded.rows or not raw.rows:
            size = self.inner.payload_bytes(coded, src.dtype)
            calls += self.inner.encode_calls(src, state, coded, context, payload[:size])
        if raw.rows:
            sent = payload[payload.numel() - raw.numel * src.dtype.itemsize :]
            payload[size : payload.numel() - sent.numel()].zero_()  # no call writes there
            values, copies = aligned(sent, src.dtype)
            calls.append(("gather_rows", src, raw, False, values))
            calls += [("copy_into", sent, copied) for _, copied, _ in copies]
        return calls

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        self.check(payload, segments, dtype)
        (coded, raw), calls = _parts_of(segments), list[KernelCall]()
        if coded.rows or not raw.rows:
            size = self.inner.payload_bytes(coded, dtype)
            calls += self.inner.decode_calls(payload[:size], coded, dtype, add, dst, context)
        if raw.rows:
            values, copies = aligned(payload[payload.numel() - raw.numel * dtype.itemsize :], dtype)
            calls += [*copies, ("scatter_rows", values, raw, add, dst)]
        return calls


def _parts_of(segments: Segments) -> tuple[Segments, Segments]:
    """The coded and the uncompressed segments, made once."""
    found: tuple[Segments, Segments] | None = segments.launches.get(RAW)
    if found is None:
        raw = tuple(row for row in segments.rows if row.bits == RAW)
        coded = [index for index, row in enumerate(segments.rows) if row.bits != RAW]
        found = segments.launches[RAW] = (
            Segments(
                tuple(segments.rows[index] for index in coded),
                segments.device,
                tuple(segments.names[index] for index in coded) if segments.names else (),
                tuple(segments.shapes[index] for index in coded) if segments.shapes else (),
                segments.weights,
            ),
            Segments(raw, segments.device),
        )
    return found
