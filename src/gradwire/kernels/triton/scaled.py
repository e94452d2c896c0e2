"""Blocks with one bfloat16 scale each, FP8, Natural and QSGD's exponential levels: one launch a call, a program for up to 4096
elements of a tensor.
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
from gradwire.kernels.triton.numbers import bf16_up, bf16_value, magnitude, random_hash, stream_key
from gradwire.kernels.triton.sums import norm_of

__all__ = [
    "exponential_decode",
    "exponential_encode",
    "fp8_decode",
    "fp8_encode",
    "natural_decode",
    "natural_encode",
]

E4M3, E5M2, NATURAL, EXPONENTIAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # FP8 first
_FORMATS = {"e4m3": E4M3.value, "e5m2": E5M2.value}
FP8_TINY = tl.constexpr(0x08800000)
"""Bits of 2^-110. A block whose largest magnitude is below it counts as zero: its factor would overflow."""


# ---- FP8: the sign, the exponent and M bits of mantissa, as in the formats


@triton.jit
def fp8_code(x, M: tl.constexpr):
    """The code nearest to x. |x| exceeds the largest number by rounding errors at most, which are rounded off."""
    SHIFT: tl.constexpr = 23 - M
    BIAS: tl.constexpr = 7 if M == 3 else 15
    size = magnitude(x)
    normal = (size - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT
    # in this sum the last bit of a float32 is the smallest number of the format, so that the addition rounds
    ALIGNING: tl.constexpr = (128 - BIAS - M + 23) << 23
    aligning = tl.full(size.shape, ALIGNING, tl.int32).to(tl.float32, bitcast=True)
    subnormal = magnitude(tl.abs(x) + aligning) - ALIGNING
    code = tl.where(size < ((128 - BIAS) << 23), subnormal, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def fp8_value(code, M: tl.constexpr):
    # the exponent is moved by a multiplication, which is exact and makes subnormal numbers normal
    MOVED: tl.constexpr = 2.0**120 if M == 3 else 2.0**112
    size = ((code & 0x7F) << (23 - M)).to(tl.float32, bitcast=True) * MOVED
    return tl.where(code > 0x7F, -size, size)


# ---- powers of two


@triton.jit
def power_code(size, lowest, offset, u, CODE: tl.constexpr):
    """Which power of two a size becomes, 0 for zero; u: 16 random bits, added to the mantissa."""
    mantissa = magnitude(size)
    if CODE == EXPONENTIAL:
        # below the lowest power, the floor, the mantissa of size + floor is size / floor; above it this is less than size
        floor = (lowest << 23).to(tl.float32, bitcast=True)
        mantissa = tl.maximum(mantissa, magnitude(size + floor) - (1 << 23))
    power = (mantissa + (u << 7)) >> 23
    return tl.where(power >= lowest, power - offset, 0)


@triton.jit
def power_value(code, offset, bits):
    size = code & ((1 << (bits - 1)) - 1)
    power = size + offset
    value = tl.where((size > 0) & (power > 0), power << 23, 0).to(tl.float32, bitcast=True)
    return tl.where(code >> (bits - 1) == 1, -value, value)


# ---- all of them


@triton.jit
def scale_of(largest, CODE: tl.constexpr):
    """Bits of the bfloat16 scales of blocks from those of their largest magnitudes, 0 for a block of zeros."""
    if CODE == NATURAL:
        return tl.where(largest >= TINY, (largest + 0x7FFFFF) >> 23 << 7, 0)
    elif CODE == EXPONENTIAL:
        return tl.where(largest >= TINY, bf16_up(largest), 0)
    else:
        return tl.where(largest >= FP8_TINY, bf16_up(largest), 0)


@triton.jit
def unit_of(raw, bits, CODE: tl.constexpr):
    """(what values are multiplied with, exponent that codes of powers begin after) of blocks with these scales."""
    scale = bf16_value(raw)
    if CODE == NATURAL:
        exponent = (raw >> 7) & 0xFF
        return tl.where(exponent == 0xFF, float("nan"), 1.0), exponent - 127
    elif CODE == EXPONENTIAL:
        return scale, tl.zeros_like(raw) + 128 - (1 << (bits - 1))
    elif CODE == E4M3:
        return tl.div_rn(scale, tl.full(scale.shape, 448.0, tl.float32)), raw
    else:
        return tl.div_rn(scale, tl.full(scale.shape, 57344.0, tl.float32)), raw


@triton.jit
def factor_of(raw, offset, CODE: tl.constexpr):
    """(what values are multiplied with to be coded, biased exponent of the lowest power) of blocks with these scales."""
    scale = bf16_value(raw)
    if CODE == NATURAL:
        return tl.full(scale.shape, 1.0, tl.float32), tl.maximum((raw >> 7) - 126, 1)
    elif CODE == EXPONENTIAL:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), tl.maximum(134 - (raw >> 7), offset + 1)
    elif CODE == E4M3:
        return tl.div_rn(tl.full(scale.shape, 448.0, tl.float32), scale), raw
    else:
        return tl.div_rn(tl.full(scale.shape, 57344.0, tl.float32), scale), raw


@triton.jit
def code_of(x, factor, lowest, offset, bits, u, CODE: tl.constexpr):
    if CODE < NATURAL:
        return fp8_code(x * factor, 3 if CODE == E4M3 else 2)
    else:
        size = tl.abs(x)
        if CODE == EXPONENTIAL:
            size = tl.minimum(size * factor, 1.0)
        sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
        return power_code(size, lowest, offset, u, CODE) | (sign << (bits - 1))


@triton.jit
def value_of(code, unit, offset, bits, CODE: tl.constexpr):
    if CODE < NATURAL:
        return fp8_value(code, 3 if CODE == E4M3 else 2) * unit
    else:
        return power_value(code, offset, bits) * unit


@triton.jit
def encode_blocks(
    src, residual, scales, codes, blocks, n, counter, key, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, NORM: tl.constexpr, STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS blocks of n elements; WHOLE: n is BLOCK. All pointers are to the first block's; bits is a number."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    values, insides = load_pieces(src, residual, block, present, width, n, BLOCK, RESIDUAL, WHOLE)
    largest = largest_of(values)
    finite = present & (largest < HUGE)
    if NORM:
        largest = norm_of(src, residual, row, blocks, n, ROWS, BLOCK, RESIDUAL)
    raw = tl.where(finite, scale_of(largest, CODE), 0)
    store_scale(scales + row * 2, tl.where(finite, raw, 0x7FC0), present)

    sends = (raw > 0)[:, None]
    raw = tl.where(raw > 0, raw, 0x3F80)[:, None]  # any number: nothing of these blocks is sent
    unit, offset = unit_of(raw, bits, CODE)
    factor, lowest = factor_of(raw, offset, CODE)
    finite = finite[:, None]
    first = counter.to(tl.uint32) + (block * (BLOCK // 2) + column).to(tl.uint32)
    hashed = random_hash(first, key)
    lower, upper = (), ()
    for k in tl.static_range(4):
        even, odd = halves(k, first, hashed, width, key, WHOLE and BLOCK == 128, STOCHASTIC)
        x, y = tl.where(finite, values[k], 0.0), tl.where(finite, values[k + 4], 0.0)
        a = tl.where(insides[k] & sends, code_of(x, factor, lowest, offset, bits, even, CODE), 0)
        b = tl.where(insides[k + 4] & sends, code_of(y, factor, lowest, offset, bits, odd, CODE), 0)
        if RESIDUAL:
            at = residual + block * BLOCK + k * width + column
            lost = x - tl.where(sends, value_of(a, unit, offset, bits, CODE), 0.0)
            tl.store(at, lost, mask=insides[k] & finite)
            lost = y - tl.where(sends, value_of(b, unit, offset, bits, CODE), 0.0)
            tl.store(at + 4 * width, lost, mask=insides[k + 4] & finite)
        lower += (a,)
        upper += (b,)
    out = codes + block * (BLOCK // 8 * bits) + column
    pack(lower + upper, bits, width, out, present[:, None] & (column < width))


@triton.jit
def decode_blocks(
    dst, scales, codes, blocks, n, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As encode_blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    mask = present[:, None] & (column < width)
    unit, offset = unit_of(load_scale(scales + row * 2, present)[:, None], bits, CODE)
    pieces = unpack(codes + block * (BLOCK // 8 * bits) + column, bits, width, column, mask)
    for k in tl.static_range(8):
        value = value_of(pieces[k], unit, offset, bits, CODE)
        store_piece(dst + block * BLOCK, k * width + column, value, mask, n, ADD, WHOLE)


@triton.jit
def scaled_encode_kernel(
    src, residual, table, stream, payload,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, NORM: tl.constexpr, STOCHASTIC: tl.constexpr,
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
            ROWS, BLOCK, CODE, NORM, STOCHASTIC, RESIDUAL, True,
        )  # fmt: skip
    else:
        blocks = 1
        encode_blocks(
            src, residual, scales, codes, blocks, numel, counter, key, bits,
            1, BLOCK, CODE, NORM, STOCHASTIC, RESIDUAL, False,
        )  # fmt: skip
    byte = tl.arange(0, 16)
    tl.store(scales + blocks * 2 + byte, tl.zeros([16], tl.uint8), mask=byte < padding)


@triton.jit
def scaled_decode_kernel(
    payload, table, dst,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, bits = program(table, ALIGNED)
    dst, scales, codes = dst + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, scales, codes, blocks, BLOCK, bits, ROWS, BLOCK, CODE, ADD, True)
    else:
        decode_blocks(dst, scales, codes, 1, numel, bits, 1, BLOCK, CODE, ADD, False)


def fp8_encode(
    src: torch.Tensor, residual: torch.Tensor | None, segments: Segments, block: int, format: str, payload: torch.Tensor
) -> None:
    """As `reference.fp8_encode`."""
    _encode(src, residual, segments, None, block, _FORMATS[format], False, payload)


def fp8_decode(
    payload: torch.Tensor, segments: Segments, block: int, format: str, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.fp8_decode`."""
    _decode(payload, segments, block, _FORMATS[format], add, dst)


def natural_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    payload: torch.Tensor,
) -> None:
    """As `reference.natural_encode`."""
    _encode(src, residual, segments, stream, block, NATURAL.value, False, payload)


def natural_decode(payload: torch.Tensor, segments: Segments, block: int, add: bool, dst: torch.Tensor) -> None:
    """As `reference.natural_decode`."""
    _decode(payload, segments, block, NATURAL.value, add, dst)


def exponential_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: torch.Tensor,
) -> None:
    """As `reference.exponential_encode`."""
    drawn = stream if rounding == "stochastic" else None
    _encode(src, residual, segments, drawn, block, EXPONENTIAL.value, scale == "l2", payload)


def exponential_decode(payload: torch.Tensor, segments: Segments, block: int, add: bool, dst: torch.Tensor) -> None:
    """As `reference.exponential_decode`."""
    _decode(payload, segments, block, EXPONENTIAL.value, add, dst)


def _encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor | None,
    block: int,
    code: int,
    norm: bool,
    payload: torch.Tensor,
) -> None:
    programs = _programs_of(segments, block, code)
    check_flat(src, programs.numel, [residual])
    check_payload(payload, programs.payload_bytes)
    if stream is not None:
        check_stream(stream)
    if len(programs.table):
        kept = src if residual is None else residual
        with device_of(src):
            scaled_encode_kernel[(len(programs.table),)](
                src, kept, programs.table, programs.table if stream is None else stream, payload,
                NORM=norm, STOCHASTIC=stream is not None, RESIDUAL=residual is not None,
                **_constants(programs, block, code),
            )  # fmt: skip


def _decode(payload: torch.Tensor, segments: Segments, block: int, code: int, add: bool, dst: torch.Tensor) -> None:
    programs = _programs_of(segments, block, code)
    check_dst(dst, programs.numel, add)
    check_payload(payload, programs.payload_bytes)
    if len(programs.table):
        with device_of(dst):
            scaled_decode_kernel[(len(programs.table),)](
                payload, programs.table, dst, ADD=add, **_constants(programs, block, code)
            )


def _programs_of(segments: Segments, block: int, code: int) -> Programs:
    return programs_of(segments, block, bits=0 if code == EXPONENTIAL.value else 8)


def _constants(programs: Programs, block: int, code: int) -> dict[str, Any]:
    """What the kernels are compiled for."""
    each = {"ROWS": blocks_each(block), "BLOCK": block, "CODE": code, "ALIGNED": programs.aligned}
    return {**each, "num_warps": 8 if block > 4096 else 4, **OPTIONS}
