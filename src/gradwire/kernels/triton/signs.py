"""Signs, with or without means of blocks. A call is one launch, and a program handles up to 4096 elements of a tensor (8192 for
blocks of 8192). Programs begin at whole units of signs and at whole blocks. A program holds the bytes of a unit as in blocks.py:
each byte takes its bits from one of 64 columns. If a block is a whole run, two launches compute the means first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core import SIGN_UNIT, coded_bytes
from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import load_byte, load_scale, load_value, store_value
from gradwire.kernels.triton.launch import (
    ELEMENTS,
    Programs,
    check_dst,
    check_flat,
    check_payload,
    launch,
    made_once,
    program,
    reach_of,
)
from gradwire.kernels.triton.numbers import bf16_value, magnitude, negated, widen
from gradwire.kernels.triton.sums import LANES, add_signed, folded, negative, store_means, store_run_means

UNIT = tl.constexpr(SIGN_UNIT)


@triton.jit
def units_of(numel, UNITS: tl.constexpr, WHOLE: tl.constexpr):
    """(unit, column, elements of the unit, columns of it) as tensors that broadcast to (UNITS, 64)."""
    unit, column = tl.arange(0, UNITS)[:, None], tl.arange(0, UNIT // 8)[None, :]
    n = tl.minimum(tl.maximum(numel - unit * UNIT, 0), UNIT)
    return unit, column, n, UNIT // 8 if WHOLE else (n + 7) // 8


@triton.jit
def store_block_means(
    src, residual, scales, numel,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The means of the blocks of up to SPAN elements."""
    block, lane = tl.arange(0, SPAN // BLOCK), tl.arange(0, LANES)[None, :]
    n = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK)
    above, under = tl.zeros([SPAN // BLOCK, LANES], tl.float32), tl.zeros([SPAN // BLOCK, LANES], tl.float32)
    below = tl.zeros([SPAN // BLOCK, LANES], tl.int32)
    for start in range(0, BLOCK, LANES):
        i = start + lane
        value = load_value(src, residual, block[:, None] * BLOCK + i, i < n[:, None], RESIDUAL)
        above, under, below = add_signed(above, under, below, value, MEANS)
    total, beneath, many = folded(above, SPAN // BLOCK), folded(under, SPAN // BLOCK), tl.sum(below, axis=1)
    store_means(scales + block * (2 * MEANS), total, beneath, many, n, n > 0, MEANS)


@triton.jit
def encode_units(
    src, state, scales, codes, numel, keep, rest,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr, STATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The signs of up to SPAN elements. STATE: with means a residual, without them a momentum."""
    unit, column, n, width = units_of(numel, SPAN // UNIT, WHOLE)
    byte = tl.zeros([SPAN // UNIT, UNIT // 8], tl.int32)
    for k in tl.static_range(8):
        i = k * width + column
        inside = (column < width) & (i < n)
        at = unit * UNIT + i
        if MEANS:
            value = load_value(src, state, at, inside, STATE)
            below = negative(value, MEANS)
            place = scales + at // BLOCK * (2 * MEANS)
            first = load_scale(place, inside)
            mean = bf16_value(first)
            finite = (first & 0x7FFF) <= 0x7F80
            if STATE:
                other = bf16_value(load_scale(place + 2, inside)) if MEANS == 2 else negated(mean)
                tl.store(state + at, value - tl.where(below, other, mean), mask=inside & finite)
            below &= finite
        else:
            value = widen(tl.load(src + at, mask=inside, other=0.0))
            below = negative(value, MEANS)
            if STATE:
                mean = tl.load(state + at, mask=inside, other=0.0) * keep + value * rest
                finite = magnitude(mean) < 0x7F800000
                tl.store(state + at, mean, mask=inside & finite)
                below = tl.where(finite, negative(mean, MEANS), below)
        byte |= (below & inside).to(tl.int32) << k
    tl.store(codes + unit * (UNIT // 8) + column, byte.to(tl.uint8), mask=(column < width) & (n > 0))


@triton.jit
def sign_encode_kernel(
    src, state, table, payload, keep, rest,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr, KNOWN: tl.constexpr, STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs. KNOWN: the means are in the payload."""
    first, numel, scale, padding, code, _, _, _ = program(table, ALIGNED)
    src, state, scales, codes = src + first, state + first, payload + scale, payload + code
    if MEANS:
        if not KNOWN:
            store_block_means(src, state, scales, numel, SPAN, BLOCK, MEANS, STATE)
        used, byte = (numel + BLOCK - 1) // BLOCK * (2 * MEANS), tl.arange(0, 16)
        tl.store(scales + used + byte, tl.zeros([16], tl.uint8), mask=byte < padding)
        tl.debug_barrier()  # all means are there, and all have read the residual, before any thread goes on
    if numel == SPAN:
        encode_units(src, state, scales, codes, numel, keep, rest, SPAN, BLOCK, MEANS, STATE, True)
    else:
        encode_units(src, state, scales, codes, numel, keep, rest, SPAN, BLOCK, MEANS, STATE, False)


@triton.jit
def decode_units(
    scales, codes, dst, numel,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The opposite of encode_units; without means -1 and 1."""
    unit, column, n, width = units_of(numel, SPAN // UNIT, WHOLE)
    byte = load_byte(codes + unit * (UNIT // 8) + column, (column < width) & (n > 0))
    for k in tl.static_range(8):
        i = k * width + column
        inside = (column < width) & (i < n)
        at = unit * UNIT + i
        below = (byte >> k & 1) == 1
        if MEANS:
            place = scales + at // BLOCK * (2 * MEANS)
            mean = bf16_value(load_scale(place, inside))
            other = bf16_value(load_scale(place + 2, inside)) if MEANS == 2 else negated(mean)
            value = tl.where(below, other, mean)
        else:
            value = tl.where(below, -1.0, 1.0)
        store_value(dst + at, value, inside, ADD)


@triton.jit
def sign_decode_kernel(
    payload, table, dst,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, _ = program(table, ALIGNED)
    dst, scales, codes = dst + first, payload + scale, payload + code
    if numel == SPAN:
        decode_units(scales, codes, dst, numel, SPAN, BLOCK, MEANS, ADD, True)
    else:
        decode_units(scales, codes, dst, numel, SPAN, BLOCK, MEANS, ADD, False)


def sign_encode(src: Tensor, momentum: State, keep: float, segments: Segments, payload: Tensor) -> None:
    _encode(src, momentum, keep, segments, 0, 0, payload)


def mean_sign_encode(src: Tensor, residual: State, segments: Segments, block: int, means: int, payload: Tensor) -> None:
    _encode(src, residual, 0.0, segments, block, means, payload)


def sign_decode(payload: Tensor, segments: Segments, block: int, means: int, add: bool, dst: Tensor) -> None:
    programs = _programs_of(segments, block, means)
    check_dst(dst, programs.numel, add)
    check_payload(payload, programs.payload_bytes)
    constants = _constants(programs, block, means)
    launch(sign_decode_kernel, len(programs.table), payload, programs.table, dst, ADD=add, **constants)


def _encode(src: Tensor, state: State, keep: float, segments: Segments, block: int, means: int, payload: Tensor) -> None:
    programs = _programs_of(segments, block, means)
    check_flat(src, programs.numel, [state])
    check_payload(payload, programs.payload_bytes)
    known = bool(means) and not block
    if known:
        store_run_means(src, state, segments, means, payload)
    launch(
        sign_encode_kernel, len(programs.table), src, state, programs.table, payload, keep,
        1.0 - keep, KNOWN=known, STATE=state is not None, **_constants(programs, block, means),
    )  # fmt: skip


def _constants(programs: Programs, block: int, means: int) -> dict[str, Any]:
    """The constants that the kernels are compiled for. Without blocks, a program is inside one block."""
    span = max(ELEMENTS, block)
    each = {"SPAN": span, "BLOCK": block or span, "MEANS": means, "ALIGNED": programs.aligned}
    return {**each, "num_warps": 8 if span > ELEMENTS else 4}


@made_once
def _programs_of(segments: Segments, block: int, means: int) -> Programs:
    if block and (block & (block - 1) or not 32 <= block <= 8192):
        raise RuntimeError(f"a block of {block} elements is not a power of two from 32 to 8192, nor 0")
    reach_of(segments)
    span, sizes = max(ELEMENTS, block), coded_bytes([(row.numel, 1) for row in segments.rows], block, means)
    rows, scale_at, code_at = [torch.zeros(0, 8, dtype=torch.int64)], 0, sizes.scales
    for row in segments.rows:
        start = torch.arange(0, row.numel, span)
        columns = torch.zeros(len(start), 8, dtype=torch.int64)
        columns[:, 0], columns[:, 1] = row.offset + start, (row.numel - start).clamp(max=span)
        columns[:, 2] = scale_at + (start // block * 2 * means if block else 0)
        columns[:, 4] = code_at + start // 8
        rows.append(columns)
        scale_at += (-(-row.numel // block) if block else min(row.numel, 1)) * 2 * means
        code_at += (row.numel + 7) // 8
    table = torch.cat(rows)
    if len(table):
        table[-1, 3] = sizes.scales - scale_at
    return Programs.of(table, segments, sum(sizes))
