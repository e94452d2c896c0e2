"""Uncompressed tensors beside compressed ones, in one payload. Law: the compressor's; exact for uncompressed tensors."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.core import RAW
from gradwire.kernels import Segments, cpu
from gradwire.kernels.cpu import Call


class _Parts(NamedTuple):
    """The two kinds of elements of some segments."""

    coded: Segments
    raw: Tensor
    """int64 indices of the uncompressed elements in the flat buffer, in the order of the segments."""
    raw_rows: Segments
    """The same as segments."""


class BesideCompressor(Compressor):
    """Segments with `bits` RAW travel as they are, behind the payload of the inner compressor, from a multiple of 16 bytes on."""

    def __init__(self, inner: Compressor) -> None:
        super().__init__(inner.spec)
        self.inner, self.encodes_own_part = inner, inner.encodes_own_part

    @cached_property
    def _for_sum(self) -> "BesideCompressor":
        again = self.inner.for_sum()
        return self if again is self.inner else BesideCompressor(again)

    def for_sum(self) -> "BesideCompressor":
        return self._for_sum

    def summing(self, terms: int, ranks: int) -> Compressor:
        inner = self.inner.summing(terms, ranks)
        return self if inner is self.inner else BesideCompressor(inner)

    @property
    def runs_in_c(self) -> bool:
        return self.inner.runs_in_c and type(self).__module__.startswith("gradwire.")

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[Call]:
        parts, calls, size = _parts_of(segments), [], 0
        if parts.coded.rows or not parts.raw_rows.rows:
            size = self.inner.payload_bytes(parts.coded, src.dtype)
            calls += self.inner.encode_calls(src, state, parts.coded, context, payload[:size])
        if parts.raw_rows.rows:
            raw = _raw_of(payload, parts, src.dtype)
            payload[size : payload.numel() - raw.nbytes].zero_()  # once: no encode writes there
            calls.append(cpu.call("gather_rows", src, parts.raw_rows, False, raw))
        return calls

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[Call]:
        self.check(payload, segments, dtype)
        parts, calls = _parts_of(segments), []
        if parts.coded.rows or not parts.raw_rows.rows:
            size = self.inner.payload_bytes(parts.coded, dtype)
            calls += self.inner.decode_calls(payload[:size], parts.coded, dtype, add, dst, context)
        if parts.raw_rows.rows:
            calls.append(cpu.call("scatter_rows", _raw_of(payload, parts, dtype), parts.raw_rows, add, dst))
        return calls

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        parts = _parts_of(segments)
        size = 0
        if parts.coded.rows or not parts.raw.numel():
            size = self.inner.payload_bytes(parts.coded, src.dtype)
            self.inner.encode(src, state, parts.coded, context, payload[:size])
        if parts.raw.numel():
            values = src.index_select(0, parts.raw)
            begin = payload.numel() - values.numel() * src.element_size()
            payload[size:begin].zero_()
            payload[begin:].copy_(values.view(torch.uint8))

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        parts = _parts_of(segments)
        if parts.coded.rows or not parts.raw.numel():
            size = self.inner.payload_bytes(parts.coded, dtype)
            self.inner.decode(payload[:size], parts.coded, dtype, add, dst, context)
        if parts.raw.numel():
            sent = payload[payload.numel() - parts.raw.numel() * dtype.itemsize :]
            aligned = sent.storage_offset() % dtype.itemsize == 0  # else the bytes are copied before they are numbers
            values = (sent if aligned else sent.clone()).view(dtype).to(dst.dtype)
            if add:
                dst.index_add_(0, parts.raw, values)
            else:
                dst.index_copy_(0, parts.raw, values)


def _raw_of(payload: Tensor, parts: _Parts, dtype: torch.dtype) -> Tensor:
    """The uncompressed elements of a payload that begins at an address of its own, so that they are aligned."""
    return payload[payload.numel() - parts.raw_rows.numel * dtype.itemsize :].view(dtype)


def _parts_of(segments: Segments) -> _Parts:
    found: _Parts | None = segments.launches.get(RAW)
    if found is None:
        coded = [index for index, row in enumerate(segments.rows) if row.bits != RAW]
        raw = tuple(row for row in segments.rows if row.bits == RAW)
        ranges = [torch.arange(row.offset, row.offset + row.numel) for row in raw]
        found = segments.launches[RAW] = _Parts(
            Segments(
                tuple(segments.rows[index] for index in coded),
                segments.device,
                tuple(segments.names[index] for index in coded) if segments.names else (),
                tuple(segments.shapes[index] for index in coded) if segments.shapes else (),
            ),
            torch.cat(ranges).to(segments.device) if ranges else torch.empty(0, dtype=torch.int64),
            Segments(raw, segments.device),
        )
    return found
