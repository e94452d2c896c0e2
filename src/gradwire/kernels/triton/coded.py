"""QSGD, TernGrad with clipping (QSGD with 2 bits of clipped values), FP8, Natural, QSGD's other levels and thresholds. A
call is one launch, and a program encodes up to 4096 elements of a tensor.
"""

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import (
    halves,
    load_pieces,
    load_scale,
    load_weight,
    pack,
    pack_base_3,
    store_piece,
    store_scale,
    unpack,
    unpack_base_3,
)
from gradwire.kernels.triton.launch import (
    Programs,
    blocks_each,
    check_dst,
    check_flat,
    check_payload,
    check_stream,
    check_weights,
    launch,
    program,
    programs_of,
)
from gradwire.kernels.triton.levels import (
    CLIPPED,
    E4M3,
    E5M2,
    EXPONENTIAL,
    FITTED,
    FIXED,
    LLOYD,
    MAX,
    MINMAX,
    NATURAL,
    THRESHOLD,
    code_of,
    grid_of,
    scales_of,
    value_of,
)
from gradwire.kernels.triton.numbers import magnitude, random_hash, stream_key

_FORMATS = {"e4m3": E4M3.value, "e5m2": E5M2.value}
_BITS = {CLIPPED.value: 2, E4M3.value: 8, E5M2.value: 8, NATURAL.value: 8, THRESHOLD.value: 2, FIXED.value: 2}
"""Bits of an element, if these are not the bits of its segment."""
_SCALES = {MINMAX.value: 2, FIXED.value: 0}
"""Scales of a block, if a block does not have one scale."""
_TERNARY = (MAX.value, CLIPPED.value, FITTED.value)
"""Formats whose codes of 2 bits stand for three values."""


@triton.jit
def encode_piece(
    values, inside, finite, sends, grid, bits, u, at, weight, CODE: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr
):
    """The codes of one piece of blocks; u: 16 random bits, or what rounds to nearest; at, weight: the places of its residual and
    of its weights."""
    x = tl.where(finite, values, 0.0)
    code = tl.where(inside & sends, code_of(x, grid, bits, u, CODE), 0)
    if RESIDUAL:
        lost = x - tl.where(sends, value_of(code, grid, bits, CODE), 0.0)
        if WEIGHTED:
            lost *= load_weight(weight, inside)
        carried = inside & finite
        if CODE == FIXED:
            carried &= magnitude(lost) <= 0x7F800000
        tl.store(at, lost, mask=carried)
    return code


@triton.jit
def encode_blocks(
    src, residual, weights, scales, codes, blocks, n, counter, key, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, NORM: tl.constexpr, FACTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr, TERNARY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS blocks of n elements; WHOLE: n is BLOCK. All pointers are to the first block's; bits is a number."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    values, insides = load_pieces(src, residual, weights, block, present, width, n, BLOCK, RESIDUAL, WEIGHTED, WHOLE)
    finite, low, high = scales_of(
        src, residual, weights, row, blocks, n, values, insides, bits, ROWS, BLOCK, CODE, NORM, FACTOR, RESIDUAL, WEIGHTED
    )
    if CODE == MINMAX:
        store_scale(scales + row * 4, tl.where(finite, low, 0x7FC0), present)
        store_scale(scales + row * 4 + 2, tl.where(finite, high, 0x7FC0), present)
    elif CODE != FIXED:
        store_scale(scales + row * 2, tl.where(finite, high, 0x7FC0), present)

    sends = finite[:, None]
    if CODE > CLIPPED and CODE < FIXED:
        sends = (high > 0)[:, None]
        high = tl.where(high > 0, high, 0x3F80)  # any number: nothing of these blocks is sent
    grid, finite = grid_of(low[:, None], high[:, None], bits, CODE, FACTOR), finite[:, None]
    first = counter.to(tl.uint32) + (block * (BLOCK // 2) + column).to(tl.uint32)
    hashed = random_hash(first, key)
    lower, upper = (), ()
    for k in tl.static_range(4):
        even, odd = halves(k, first, hashed, width, key, WHOLE and BLOCK == 128, STOCHASTIC)
        at = block * BLOCK + k * width + column
        lower += (
            encode_piece(
                values[k], insides[k], finite, sends, grid, bits, even, residual + at, weights + at, CODE, RESIDUAL, WEIGHTED
            ),
        )
        at += 4 * width
        upper += (
            encode_piece(
                values[k + 4],
                insides[k + 4],
                finite,
                sends,
                grid,
                bits,
                odd,
                residual + at,
                weights + at,
                CODE,
                RESIDUAL,
                WEIGHTED,
            ),
        )
    out, mask = codes + block * (BLOCK // 8 * bits) + column, present[:, None] & (column < width)
    if WHOLE and TERNARY:
        if bits == 2:
            pack_base_3(lower + upper, present, codes + block * (BLOCK // 64 * 13), ROWS, BLOCK // 8)
        else:
            pack(lower + upper, bits, width, out, mask)
    else:
        pack(lower + upper, bits, width, out, mask)


@triton.jit
def decode_blocks(
    dst, weights, scales, codes, blocks, n, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, FACTOR: tl.constexpr, ADD: tl.constexpr,
    WEIGHTED: tl.constexpr, TERNARY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Decode up to ROWS blocks of n elements, with the arguments of encode_blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    mask = present[:, None] & (column < width)
    if CODE == MINMAX:
        low, high = load_scale(scales + row * 4, present), load_scale(scales + row * 4 + 2, present)
    else:
        high = tl.zeros([ROWS], tl.int32) if CODE == FIXED else load_scale(scales + row * 2, present)
        low = high
    grid = grid_of(low[:, None], high[:, None], bits, CODE, FACTOR)
    packed = codes + block * (BLOCK // 8 * bits) + column
    if WHOLE and TERNARY:
        if bits == 2:
            pieces = unpack_base_3(codes + block * (BLOCK // 64 * 13), column, mask, BLOCK // 8)
        else:
            pieces = unpack(packed, bits, width, column, mask)
    else:
        pieces = unpack(packed, bits, width, column, mask)
    for k in tl.static_range(8):
        value = value_of(pieces[k], grid, bits, CODE)
        if WEIGHTED:
            j = k * width + column
            value *= load_weight(weights + block * BLOCK + j, mask & (j < n))
        store_piece(dst + block * BLOCK, k * width + column, value, mask, n, ADD, WHOLE)


@triton.jit
def coded_encode_kernel(
    src, residual, weights, table, stream, payload,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, NORM: tl.constexpr, FACTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr, TERNARY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, padding, code, counter, tensor, bits = program(table, ALIGNED)
    key = tensor.to(tl.uint64, bitcast=True)
    if STOCHASTIC:
        key = stream_key(stream, tensor)
    src, residual, weights, scales, codes = src + first, residual + first, weights + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        encode_blocks(
            src, residual, weights, scales, codes, blocks, BLOCK, counter, key, bits,
            ROWS, BLOCK, CODE, NORM, FACTOR, STOCHASTIC, RESIDUAL, WEIGHTED, TERNARY, True,
        )  # fmt: skip
    else:
        blocks = 1
        encode_blocks(
            src, residual, weights, scales, codes, blocks, numel, counter, key, bits,
            1, BLOCK, CODE, NORM, FACTOR, STOCHASTIC, RESIDUAL, WEIGHTED, TERNARY, False,
        )  # fmt: skip
    byte = tl.arange(0, 16)
    used = blocks * (4 if CODE == MINMAX else 2)
    tl.store(scales + used + byte, tl.zeros([16], tl.uint8), mask=byte < padding)


@triton.jit
def coded_decode_kernel(
    payload, table, dst, weights,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, FACTOR: tl.constexpr, ADD: tl.constexpr,
    WEIGHTED: tl.constexpr, TERNARY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, bits = program(table, ALIGNED)
    dst, weights, scales, codes = dst + first, weights + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, weights, scales, codes, blocks, BLOCK, bits, ROWS, BLOCK, CODE, FACTOR, ADD, WEIGHTED, TERNARY, True)
    else:
        decode_blocks(dst, weights, scales, codes, 1, numel, bits, 1, BLOCK, CODE, FACTOR, ADD, WEIGHTED, TERNARY, False)


def _encode(
    code: int, src: Tensor, residual: State, segments: Segments, stream: Tensor | None, block: int, payload: Tensor,
    norm: bool = False, factor: float = 0.0, weights: State = None,
) -> None:  # fmt: skip
    programs = _programs(segments, block, code)
    check_flat(src, programs.numel, [residual])
    check_weights(weights, src)
    check_payload(payload, programs.payload_bytes)
    if stream is not None:
        check_stream(stream)
    launch(
        coded_encode_kernel, len(programs.table), src, residual, weights, programs.table, stream, payload,
        NORM=norm, FACTOR=float(factor), STOCHASTIC=stream is not None, RESIDUAL=residual is not None,
        WEIGHTED=weights is not None,
        **_constants(programs, block, code),
    )  # fmt: skip


def _decode(
    code: int, payload: Tensor, segments: Segments, block: int, add: bool, dst: Tensor, factor: float = 0.0,
    weights: State = None,
) -> None:  # fmt: skip
    programs = _programs(segments, block, code)
    check_dst(dst, programs.numel, add)
    check_weights(weights, dst)
    check_payload(payload, programs.payload_bytes)
    launch(
        coded_decode_kernel, len(programs.table), payload, programs.table, dst, weights, FACTOR=float(factor), ADD=add,
        WEIGHTED=weights is not None,
        **_constants(programs, block, code),
    )  # fmt: skip


def _programs(segments: Segments, block: int, code: int) -> Programs:
    return programs_of(segments, block, _SCALES.get(code, 1), _BITS.get(code, 0), code in _TERNARY)


def _constants(programs: Programs, block: int, code: int) -> dict[str, Any]:
    """The constants that the kernels are compiled for."""
    each = {"ROWS": blocks_each(block), "BLOCK": block, "CODE": code, "ALIGNED": programs.aligned}
    return {**each, "TERNARY": code in _TERNARY and block >= 64, "num_warps": 8 if block > 4096 else 4}


natural_encode = partial(_encode, NATURAL.value)
natural_decode = partial(_decode, NATURAL.value)
exponential_decode = partial(_decode, EXPONENTIAL.value)


def qsgd_encode(
    src: Tensor, residual: State, segments: Segments, stream: Tensor, block: int, scale: str, rounding: str,
    payload: Tensor,
) -> None:  # fmt: skip
    code, drawn = MINMAX if scale == "minmax" else MAX, stream if rounding == "stochastic" else None
    _encode(code.value, src, residual, segments, drawn, block, payload, norm=scale == "l2")


def qsgd_decode(payload: Tensor, segments: Segments, block: int, scale: str, add: bool, dst: Tensor) -> None:
    _decode((MINMAX if scale == "minmax" else MAX).value, payload, segments, block, add, dst)


def fitted_encode(
    src: Tensor, residual: State, segments: Segments, weights: State, block: int, levels: str, payload: Tensor
) -> None:
    _check_fitted(segments)
    code = LLOYD if levels == "lloyd" else FITTED
    _encode(code.value, src, residual, segments, None, block, payload, weights=weights)


def fitted_decode(payload: Tensor, segments: Segments, weights: State, block: int, levels: str, add: bool, dst: Tensor) -> None:
    _check_fitted(segments)
    code = LLOYD if levels == "lloyd" else FITTED
    _decode(code.value, payload, segments, block, add, dst, weights=weights)


def _check_fitted(segments: Segments) -> None:
    for index, row in enumerate(segments.rows):
        if row.bits > 4:
            raise RuntimeError(f"segment {index} has {row.bits} bits: levels with a scale by least squares have 2 to 4")


def exponential_encode(
    src: Tensor, residual: State, segments: Segments, stream: Tensor, block: int, scale: str, rounding: str,
    payload: Tensor,
) -> None:  # fmt: skip
    drawn = stream if rounding == "stochastic" else None
    _encode(EXPONENTIAL.value, src, residual, segments, drawn, block, payload, norm=scale == "l2")


def terngrad_encode(
    src: Tensor, residual: State, segments: Segments, stream: Tensor, block: int, clip: float, payload: Tensor
) -> None:
    _encode(CLIPPED.value, src, residual, segments, stream, block, payload, factor=clip)


def fp8_encode(src: Tensor, residual: State, segments: Segments, block: int, format: str, payload: Tensor) -> None:
    _encode(_FORMATS[format], src, residual, segments, None, block, payload)


def fp8_decode(payload: Tensor, segments: Segments, block: int, format: str, add: bool, dst: Tensor) -> None:
    _decode(_FORMATS[format], payload, segments, block, add, dst)


def threshold_encode(
    src: Tensor, residual: State, segments: Segments, block: int, threshold: float, multiple: float, payload: Tensor
) -> None:
    code = FIXED if threshold else THRESHOLD
    _encode(code.value, src, residual, segments, None, block, payload, factor=threshold or multiple)


def threshold_decode(payload: Tensor, segments: Segments, block: int, threshold: float, add: bool, dst: Tensor) -> None:
    _decode((FIXED if threshold else THRESHOLD).value, payload, segments, block, add, dst, factor=threshold)
