"""Payloads that hold uncompressed tensors next to compressed ones. Law: the compressor's; exact for uncompressed tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, WrappingListCompressor, aligned
from gradwire.core import RAW
from gradwire.kernels import Batch, BatchPart, KernelCall, Segments


class BesideCompressor(WrappingListCompressor):
    """Segments with `bits` RAW travel as they are, behind the payload of the inner compressor, from a multiple of 16 bytes on."""

    def __init__(self, inner: Compressor) -> None:
        super().__init__(inner.spec, inner)

    def around(self, inner: Compressor) -> Compressor:
        return BesideCompressor(inner)

    @property
    def batches(self) -> bool:
        return self.inner.batches

    def adds_payloads(self, segments: Segments) -> bool:
        return self.inner.adds_payloads(segments) and not any(row.bits == RAW for row in segments.rows)

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        if isinstance(segments, Batch):
            return self._encode_batch(src, state, segments, context, payload)
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
        if isinstance(segments, Batch):
            return self._decode_batch(payload, segments, dtype, add, dst, context)
        (coded, raw), calls = _parts_of(segments), list[KernelCall]()
        if coded.rows or not raw.rows:
            size = self.inner.payload_bytes(coded, dtype)
            calls += self.inner.decode_calls(payload[:size], coded, dtype, add, dst, context)
        if raw.rows:
            values, copies = aligned(payload[payload.numel() - raw.numel * dtype.itemsize :], dtype)
            calls += [*copies, ("scatter_rows", values, raw, add, dst)]
        return calls

    def _encode_batch(
        self, src: Tensor, state: Sequence[Tensor], batch: Batch, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        """One call encodes what is compressed of all payloads; each payload with uncompressed tensors takes one more."""
        cut, calls = self._cut(batch, src.dtype), list[KernelCall]()
        if cut.coded is not None:
            calls += self.inner.encode_calls(src, state, cut.coded, context, payload[: cut.coded.nbytes])
        for raw, first, end, byte, end_byte, gap in cut.raw:
            sent = payload[byte:end_byte]
            payload[gap:byte].zero_()
            values, copies = aligned(sent, src.dtype)
            calls.append(("gather_rows", src[first:end], raw, False, values))
            calls += [("copy_into", sent, copied) for _, copied, _ in copies]
        return calls

    def _decode_batch(
        self, payload: Tensor, batch: Batch, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        cut, calls = self._cut(batch, dtype), list[KernelCall]()
        if cut.coded is not None:
            calls += self.inner.decode_calls(payload[: cut.coded.nbytes], cut.coded, dtype, add, dst, context)
        for raw, first, end, byte, end_byte, _ in cut.raw:
            values, copies = aligned(payload[byte:end_byte], dtype)
            calls += [*copies, ("scatter_rows", values, raw, add, dst[first:end])]
        return calls

    def _cut(self, batch: Batch, dtype: torch.dtype) -> "_BatchCut":
        """The compressed and the uncompressed parts of payloads, made once."""
        key = RAW, dtype
        if (found := batch.launches.get(key)) is None:
            coded_parts, raw_parts = list[BatchPart](), list[_RawPart]()
            for part in batch.parts:
                coded, raw = _parts_of(part.segments)
                size = self.inner.payload_bytes(coded, dtype) if coded.rows or not raw.rows else 0
                if size:
                    coded_parts.append(part._replace(segments=coded, end_byte=part.byte + size))
                if raw.rows:
                    byte = part.end_byte - raw.numel * dtype.itemsize
                    raw_parts.append(_RawPart(raw, part.first, part.end, byte, part.end_byte, part.byte + size))
            made = Batch.of_parts(coded_parts) if coded_parts else None
            if made is not None:
                made.payload_bytes.update(dict.fromkeys(batch.payload_bytes, made.nbytes))
            found = batch.launches[key] = _BatchCut(made, raw_parts)
        return found


class _RawPart(NamedTuple):
    """The uncompressed segments of a payload of a batch."""

    segments: Segments
    first: int
    """The first element of the payload, and the end."""
    end: int
    byte: int
    """The first byte of these segments, and the end."""
    end_byte: int
    gap: int
    """The first byte behind the inner compressor's payload."""


class _BatchCut(NamedTuple):
    coded: Batch | None
    raw: list[_RawPart]


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
