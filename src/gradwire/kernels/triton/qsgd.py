"""QSGD, and TernGrad with clipping, whose codes are QSGD's with 2 bits of values cut back to a smaller scale: one launch a call,
a program for up to 4096 elements of a tensor.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.blocks import (
    HUGE,
    TINY,
    halves,
    largest_of,
    load_pieces,
    load_scale,
    pack,
    store_piece,
    store_scale,
    unpack,
)
from gradwire.kernels.triton.launch import (
    OPTIONS,
    Programs,
    blocks_each,
    check_dst,
    check_flat,
    check_payload,
    check_stream,
    device_of,
    program,
    programs_of,
)
from gradwire.kernels.triton.numbers import (
    bf16_towards,
    bf16_up,
    bf16_value,
    magnitude,
    ordered,
    random_hash,
    stream_key,
)
from gradwire.kernels.triton.sums import norm_of, sum_of

__all__ = ["qsgd_decode", "qsgd_encode", "terngrad_encode"]

MAX, MINMAX, L2, CLIPPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SCALES = {"max": MAX.value, "minmax": MINMAX.value, "l2": L2.value, "clipped": CLIPPED.value}
UNIT = tl.constexpr(65536.0 - 2.0**-6)  # codes have 16 fractional bits, and stay just below the largest one
SQUARE_LOW, SQUARE_HIGH = tl.constexpr(0x2B800000), tl.constexpr(0x58800000)
"""Bits of 2^-40 and 2^50. A block whose largest magnitude lies between these has squares that float32 can add up; others are
brought there."""


@triton.jit
def grid_of(low, high, bits, SCALE: tl.constexpr):
    """(base, inverse, origin, zero, step) of blocks with these scales, bits of bfloat16 as int32; low: of minmax only."""
    if SCALE == MINMAX:
        base, zero, levels = bf16_value(low), 0, (1 << bits) - 1
        span, top = bf16_value(high) - base, levels.to(tl.float32)
        origin = 0.0
    else:
        zero = (1 << (bits - 1)) - 1
        span, top = bf16_value(high), zero.to(tl.float32)
        base, origin = tl.zeros_like(span), top * 65536.0
    known = (magnitude(span) >= TINY) & (span > 0)
    inverse = tl.where(known, tl.div_rn(top * UNIT, tl.where(known, span, 1.0)), 0.0)
    return base, inverse, origin, zero, tl.div_rn(span, tl.zeros_like(span) + top)


@triton.jit
def bound_of(
    src, residual, row, blocks, n, largest,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """float32 bits of the smaller of CLIP times the root mean square and the largest magnitude, of ROWS blocks."""
    exponent = largest >> 23
    power = (tl.where(exponent < 7, 247, 254 - exponent) << 23).to(tl.float32, bitcast=True)
    by = tl.where((largest >= SQUARE_LOW) & (largest < SQUARE_HIGH), 1.0, power)
    total = sum_of(src, residual, row, blocks, n, by, ROWS, BLOCK, True, RESIDUAL)
    limit = tl.sqrt(total / n) * CLIP / by.to(tl.float64)
    return tl.minimum(magnitude(limit.to(tl.float32)), largest)


@triton.jit
def encode_blocks(
    src, residual, scales, codes, blocks, n, counter, key, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, CLIP: tl.constexpr, STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS blocks of n elements; WHOLE: n is BLOCK. All pointers are to the first block's; bits is a number."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    values, insides = load_pieces(src, residual, block, present, width, n, BLOCK, RESIDUAL, WHOLE)
    largest = largest_of(values)
    finite = present & (largest < HUGE)
    low = tl.zeros_like(largest)
    if SCALE == MINMAX:
        least, most = (
            tl.full([ROWS, BLOCK // 8], 0x7FFFFFFF, tl.int32),
            tl.full([ROWS, BLOCK // 8], -0x80000000, tl.int32),
        )
        for k in tl.static_range(8):
            place = ordered(values[k].to(tl.int32, bitcast=True))
            least = tl.minimum(least, tl.where(insides[k], place, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(insides[k], place, -0x80000000))
        low = tl.where(finite, bf16_towards(ordered(tl.min(least, axis=1)), False), 0)
        high = tl.where(finite, bf16_towards(ordered(tl.max(most, axis=1)), True), 0)
    else:
        if SCALE == L2:
            largest = norm_of(src, residual, row, blocks, n, ROWS, BLOCK, RESIDUAL)
        elif SCALE == CLIPPED:
            largest = bound_of(src, residual, row, blocks, n, largest, ROWS, BLOCK, CLIP, RESIDUAL)
        high = tl.where(finite & (largest >= TINY), bf16_up(largest), 0)
    if SCALE == MINMAX:
        store_scale(scales + row * 4, tl.where(finite, low, 0x7FC0), present)
        store_scale(scales + row * 4 + 2, tl.where(finite, high, 0x7FC0), present)
    else:
        store_scale(scales + row * 2, tl.where(finite, high, 0x7FC0), present)

    base, inverse, origin, zero, step = grid_of(low, high, bits, SCALE)
    base, inverse, step, finite = base[:, None], inverse[:, None], step[:, None], finite[:, None]
    first = counter.to(tl.uint32) + (block * (BLOCK // 2) + column).to(tl.uint32)
    hashed = random_hash(first, key)
    lower, upper = (), ()
    for k in tl.static_range(4):
        even, odd = halves(k, first, hashed, width, key, WHOLE and BLOCK == 128, STOCHASTIC)
        x, y = tl.where(finite, values[k], 0.0), tl.where(finite, values[k + 4], 0.0)
        if SCALE == CLIPPED:
            x, y = tl.clamp(x, -step, step), tl.clamp(y, -step, step)
        a, b = quantise(x, base, inverse, origin, even), quantise(y, base, inverse, origin, odd)
        if RESIDUAL:
            at = residual + block * BLOCK + k * width + column
            lost = values[k] - value_of(a, base, zero, step)
            tl.store(at, lost, mask=insides[k] & finite)
            lost = values[k + 4] - value_of(b, base, zero, step)
            tl.store(at + 4 * width, lost, mask=insides[k + 4] & finite)
        lower += (tl.where(insides[k] & finite, a, 0),)
        upper += (tl.where(insides[k + 4] & finite, b, 0),)
    out = codes + block * (BLOCK // 8 * bits) + column
    pack(lower + upper, bits, width, out, present[:, None] & (column < width))


@triton.jit
def quantise(value, base, inverse, origin, u):
    return (((value - base) * inverse + origin).to(tl.int32) + u) >> 16


@triton.jit
def value_of(code, base, zero, step):
    return (code - zero).to(tl.float32) * step + base


@triton.jit
def decode_blocks(
    dst, scales, codes, blocks, n, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As encode_blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    mask = present[:, None] & (column < width)
    if SCALE == MINMAX:
        low, high = load_scale(scales + row * 4, present), load_scale(scales + row * 4 + 2, present)
    else:
        high = load_scale(scales + row * 2, present)
        low = high
    base, _, _, zero, step = grid_of(low, high, bits, SCALE)
    pieces = unpack(codes + block * (BLOCK // 8 * bits) + column, bits, width, column, mask)
    for k in tl.static_range(8):
        value = value_of(pieces[k], base[:, None], zero, step[:, None])
        store_piece(dst + block * BLOCK, k * width + column, value, mask, n, ADD, WHOLE)


@triton.jit
def qsgd_encode_kernel(
    src, residual, table, stream, payload,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, CLIP: tl.constexpr, STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, padding, code, counter, tensor, bits = program(table, ALIGNED)
    key = tensor.to(tl.uint64, bitcast=True)
    if STOCHASTIC:
        key = stream_key(stream, tensor)
    src, residual, scales, codes = src + first, residual + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        encode_blocks(
            src, residual, scales, codes, blocks, BLOCK, counter, key, bits,
            ROWS, BLOCK, SCALE, CLIP, STOCHASTIC, RESIDUAL, True,
        )  # fmt: skip
    else:
        blocks = 1
        encode_blocks(
            src, residual, scales, codes, blocks, numel, counter, key, bits,
            1, BLOCK, SCALE, CLIP, STOCHASTIC, RESIDUAL, False,
        )  # fmt: skip
    byte = tl.arange(0, 16)
    used = blocks * (4 if SCALE == MINMAX else 2)
    tl.store(scales + used + byte, tl.zeros([16], tl.uint8), mask=byte < padding)


@triton.jit
def qsgd_decode_kernel(
    payload, table, dst,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, bits = program(table, ALIGNED)
    dst, scales, codes = dst + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, scales, codes, blocks, BLOCK, bits, ROWS, BLOCK, SCALE, ADD, True)
    else:
        decode_blocks(dst, scales, codes, 1, numel, bits, 1, BLOCK, SCALE, ADD, False)


def qsgd_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: torch.Tensor,
) -> None:
    """As `reference.qsgd_encode`."""
    programs = programs_of(segments, block, _scales(scale))
    _encode(src, residual, programs, stream, block, scale, 0.0, rounding == "stochastic", payload)


def terngrad_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    clip: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.terngrad_encode`."""
    _encode(src, residual, programs_of(segments, block, bits=2), stream, block, "clipped", clip, True, payload)


def qsgd_decode(
    payload: torch.Tensor, segments: Segments, block: int, scale: str, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.qsgd_decode`."""
    programs = programs_of(segments, block, _scales(scale))
    check_dst(dst, programs.numel, add)
    check_payload(payload, programs.payload_bytes)
    if len(programs.table):
        with device_of(dst):
            qsgd_decode_kernel[(len(programs.table),)](
                payload, programs.table, dst, ADD=add, **_constants(programs, block, scale)
            )


def _encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    programs: Programs,
    stream: torch.Tensor,
    block: int,
    scale: str,
    clip: float,
    stochastic: bool,
    payload: torch.Tensor,
) -> None:
    check_flat(src, programs.numel, [residual])
    check_payload(payload, programs.payload_bytes)
    check_stream(stream)
    if len(programs.table):
        kept = src if residual is None else residual
        with device_of(src):
            qsgd_encode_kernel[(len(programs.table),)](
                src, kept, programs.table, stream, payload,
                CLIP=clip, STOCHASTIC=stochastic, RESIDUAL=residual is not None, **_constants(programs, block, scale),
            )  # fmt: skip


def _scales(scale: str) -> int:
    """Scales of a block."""
    return 2 if scale == "minmax" else 1


def _constants(programs: Programs, block: int, scale: str) -> dict[str, Any]:
    """What the kernels are compiled for."""
    warps = 8 if block > 4096 else 4
    each = {"ROWS": blocks_each(block), "BLOCK": block, "SCALE": _SCALES[scale], "ALIGNED": programs.aligned}
    return {**each, "num_warps": warps, **OPTIONS}
