"""Random-k: one launch a call, a program for some stretches of a run, of 1024 elements if there are as many."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core import kept_of
from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import load_value, store_value
from gradwire.kernels.triton.launch import (
    check_dst,
    check_flat,
    check_payload,
    check_stream,
    launch,
    made_once,
    reach_of,
    table_of,
)
from gradwire.kernels.triton.numbers import magnitude, mix64, narrow, random_words, widen

OWN, COMMON, SENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where the key of the stream is: in (seed, step, encode, rank), in the first two of them, or in the payload's first bytes."""
STREAM_BYTES = 8
ELEMENTS = 1024
"""Elements that a program has at a time. The registers of a thread do not hold those of 4096."""


@triton.jit
def base_of(stream, KEY: tl.constexpr):
    """The key of the stream, before tensors."""
    if KEY == SENT:
        base = tl.load(stream).to(tl.uint64)
        for k in tl.static_range(1, 8):
            base |= tl.load(stream + k).to(tl.uint64) << (8 * k)
    else:
        base = mix64(tl.load(stream).to(tl.uint64, bitcast=True))
        base = mix64(base ^ tl.load(stream + 1).to(tl.uint64, bitcast=True))
        if KEY == OWN:
            base = mix64(base ^ tl.load(stream + 2).to(tl.uint64, bitcast=True))
            base = mix64(base ^ tl.load(stream + 3).to(tl.uint64, bitcast=True))
        else:
            base = mix64(mix64(base))
    return base


@triton.jit
def stretches_of(base, table, STRETCHES: tl.constexpr):
    """For STRETCHES stretches, the first element, the length, the element drawn, all in the flat buffer, the place of its value,
    and how many of them there are."""
    row = table + tl.program_id(0) * 7
    offset, numel, kept, which = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    key = mix64(base ^ tl.load(row + 5).to(tl.uint64, bitcast=True))
    key = mix64(key ^ tl.load(row + 6).to(tl.uint64, bitcast=True))
    i = which + tl.arange(0, STRETCHES)
    start = i * numel // kept
    length = (i + 1) * numel // kept - start
    word = random_words(i.to(tl.uint32), key).to(tl.uint64)
    drawn = ((word * length.to(tl.uint64)) >> 32).to(tl.int64)
    count = tl.minimum(kept - which, STRETCHES)
    return offset + start, length, offset + start + drawn, tl.load(row + 4) + tl.arange(0, STRETCHES), count


@triton.jit
def gather_kernel(
    src, residual, stream, table, values,
    STRETCHES: tl.constexpr, WIDTH: tl.constexpr, LONGEST: tl.constexpr, KEY: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The element drawn from each stretch; NaN if a value of the stretch cannot be sent."""
    start, length, at, place, count = stretches_of(base_of(stream, KEY), table, STRETCHES)
    present, column = tl.arange(0, STRETCHES) < count, tl.arange(0, WIDTH)[None, :]
    bad = tl.zeros([STRETCHES], tl.int32)
    for first in range(0, LONGEST, WIDTH):
        inside = present[:, None] & (first + column < length[:, None])
        given = load_value(src, residual, start[:, None] + first + column, inside, RESIDUAL)
        rounded = widen(narrow(given, values.dtype.element_ty))
        bad |= tl.max((inside & (magnitude(rounded) >= 0x7F800000)).to(tl.int32), axis=1)
    value = load_value(src, residual, at, present, RESIDUAL)
    if not RESIDUAL:
        value *= length.to(tl.float32)
    value = tl.where((bad > 0) | (magnitude(value) > 0x7F800000), float("nan"), value)
    sent = narrow(value, values.dtype.element_ty)
    tl.store(values + place, sent, mask=present)
    if RESIDUAL:
        left = value - widen(sent)
        tl.debug_barrier()  # all have read the residual
        for first in range(0, LONGEST, WIDTH):
            here = start[:, None] + first + column
            inside = present[:, None] & (first + column < length[:, None]) & (bad == 0)[:, None]
            unsent = load_value(src, residual, here, inside, True)
            tl.store(residual + here, tl.where(here == at[:, None], left[:, None], unsent), mask=inside)


@triton.jit
def scatter_kernel(
    values, stream, table, dst,
    STRETCHES: tl.constexpr, WIDTH: tl.constexpr, LONGEST: tl.constexpr, KEY: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Values where they were drawn, with zeros elsewhere, or added."""
    start, length, at, place, count = stretches_of(base_of(stream, KEY), table, STRETCHES)
    present, column = tl.arange(0, STRETCHES) < count, tl.arange(0, WIDTH)[None, :]
    value = widen(tl.load(values + place, mask=present, other=0.0))
    if ADD:
        store_value(dst + at, value, present, True)
    else:
        for first in range(0, LONGEST, WIDTH):
            here = start[:, None] + first + column
            inside = present[:, None] & (first + column < length[:, None])
            written = tl.where(here == at[:, None], value[:, None], 0.0)
            tl.store(dst + here, narrow(written, dst.dtype.element_ty), mask=inside)


@triton.jit
def key_kernel(stream, payload):
    """The key of the stream, as the payload begins with it."""
    base, byte = base_of(stream, OWN), tl.arange(0, 8)
    tl.store(payload + byte, (base >> (8 * byte).to(tl.uint64)).to(tl.uint8))


class _Stretches(NamedTuple):
    table: Tensor
    """int64 of shape (programs, 7): first element of the run; its elements; its stretches; number of the program's first
    stretch; place of its value; key of the tensor; the run's first element within the tensor."""
    stretches: int
    """The largest number of stretches of a program."""
    width: int
    longest: int
    """No stretch is longer; a power of two."""
    numel: int
    values: int

    def constants(self) -> dict[str, int]:
        return {"STRETCHES": self.stretches, "WIDTH": self.width, "LONGEST": self.longest}


def randomk_encode(src: Tensor, residual: State, segments: Segments, stream: Tensor, ratio: float, payload: Tensor) -> None:
    stretches = _stretches_of(segments, ratio)
    check_flat(src, stretches.numel, [residual])
    check_payload(payload, STREAM_BYTES + stretches.values * src.itemsize)
    check_stream(stream)
    values = torch.empty(stretches.values, dtype=src.dtype, device=src.device)
    _gather(src, residual, stretches, stream, OWN.value, values)
    launch(key_kernel, 1, stream, payload)
    payload[STREAM_BYTES:].copy_(values.view(torch.uint8))


def randomk_decode(payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, add: bool, dst: Tensor) -> None:
    stretches = _stretches_of(segments, ratio)
    check_payload(payload, STREAM_BYTES + stretches.values * dtype.itemsize)
    _scatter(payload[STREAM_BYTES:].clone().view(dtype), stretches, payload, SENT.value, add, dst)


def gather_random(src: Tensor, residual: State, segments: Segments, stream: Tensor, ratio: float, values: Tensor) -> None:
    stretches = _stretches_of(segments, ratio)
    check_flat(src, stretches.numel, [residual])
    check_stream(stream)
    _check_values(values, stretches)
    _gather(src, residual, stretches, stream, COMMON.value, values)


def scatter_random(values: Tensor, segments: Segments, stream: Tensor, ratio: float, add: bool, dst: Tensor) -> None:
    stretches = _stretches_of(segments, ratio)
    check_stream(stream)
    _check_values(values, stretches)
    _scatter(values, stretches, stream, COMMON.value, add, dst)


def _gather(src: Tensor, residual: State, stretches: _Stretches, stream: Tensor, key: int, values: Tensor) -> None:
    if stretches.values:
        launch(
            gather_kernel, len(stretches.table), src, residual, stream, stretches.table, values,
            KEY=key, RESIDUAL=residual is not None, **stretches.constants(),
        )  # fmt: skip


def _scatter(values: Tensor, stretches: _Stretches, stream: Tensor, key: int, add: bool, dst: Tensor) -> None:
    check_dst(dst, stretches.numel, add)
    if stretches.values:
        launch(
            scatter_kernel, len(stretches.table), values, stream, stretches.table, dst, KEY=key, ADD=add,
            **stretches.constants(),
        )  # fmt: skip


def _check_values(values: Tensor, stretches: _Stretches) -> None:
    if values.dtype != torch.float32 or not values.is_contiguous() or values.numel() != stretches.values:
        raise RuntimeError(
            f"{stretches.values} elements are drawn, as contiguous float32: this is {values.numel()} of {values.dtype}"
        )


@made_once
def _stretches_of(segments: Segments, ratio: float) -> _Stretches:
    kept = [kept_of(row.numel, ratio) for row in segments.rows]
    lengths = [-(-row.numel // k) for row, k in zip(segments.rows, kept, strict=True) if k]
    longest = triton.next_power_of_2(max(lengths, default=1))
    width = min(longest, ELEMENTS)
    each, rows, values = ELEMENTS // width, [], 0
    for row, k in zip(segments.rows, kept, strict=True):
        rows += [(row.offset, row.numel, k, i, values + i, row.key, row.first) for i in range(0, k, each)]
        values += k
    return _Stretches(table_of(rows, 7, segments), each, width, longest, reach_of(segments), values)
