"""Thresholds, two bits an element: one launch a call, a program for up to 4096 elements of a tensor."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.blocks import HUGE, load_pieces, load_scale, pack, store_piece, store_scale, unpack
from gradwire.kernels.triton.launch import (
    Programs,
    blocks_each,
    check_dst,
    check_flat,
    check_payload,
    launch,
    program,
    programs_of,
)
from gradwire.kernels.triton.numbers import bf16_value, magnitude, narrow_u16
from gradwire.kernels.triton.sums import LARGEST, sum_of


@triton.jit
def thresholds_of(
    src, residual, scales, row, blocks, n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """MULTIPLE times the mean magnitudes of ROWS blocks, which are stored, and which blocks are finite."""
    total = sum_of(src, residual, row, blocks, n, None, ROWS, BLOCK, False, RESIDUAL)
    finite = total < 2.0**126
    mean = (total / n * MULTIPLE).to(tl.float32)
    t = bf16_value(narrow_u16(tl.where(finite, mean, 0.0), True).to(tl.int32))
    t = tl.minimum(t, LARGEST)
    store_scale(scales + row * 2, tl.where(finite, magnitude(t) >> 16, 0x7FC0), row < blocks)
    return t, finite


@triton.jit
def encode_blocks(
    src, residual, scales, codes, blocks, n, threshold,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr, FIXED: tl.constexpr, RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS blocks of n elements; WHOLE: n is BLOCK. All pointers are to the first block's."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    values, insides = load_pieces(src, residual, block, present, width, n, BLOCK, RESIDUAL, WHOLE)
    if FIXED:
        t, finite = tl.full([ROWS, 1], 0.0, tl.float32) + threshold, present[:, None]
    else:
        t, finite = thresholds_of(src, residual, scales, row, blocks, n, ROWS, BLOCK, MULTIPLE, RESIDUAL)
        t, finite = t[:, None], finite[:, None]
    pieces = ()
    for k in tl.static_range(8):
        value = values[k]
        above, below = (value >= t) & (t > 0), (value <= -t) & (t > 0)
        code = tl.where(above, 1, tl.where(below, 2, 0))
        if FIXED:
            finite = magnitude(value) < HUGE
            code = tl.where(finite, code, 3)
        else:
            code = tl.where(finite, code, 0)
        if RESIDUAL:
            lost = tl.where(above, value - t, tl.where(below, value + t, value))
            tl.store(residual + block * BLOCK + k * width + column, lost, mask=insides[k] & finite)
        pieces += (tl.where(insides[k], code, 0),)
    pack(pieces, 2, width, codes + block * (BLOCK // 4) + column, present[:, None] & (column < width))


@triton.jit
def decode_blocks(
    dst, scales, codes, blocks, n, threshold,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As encode_blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    mask = present[:, None] & (column < width)
    t = tl.full([ROWS, 1], 0.0, tl.float32) + threshold
    if not FIXED:
        t = bf16_value(load_scale(scales + row * 2, present))[:, None]
    pieces = unpack(codes + block * (BLOCK // 4) + column, 2, width, column, mask)
    for k in tl.static_range(8):
        code = pieces[k]
        value = tl.where(code == 1, t, tl.where(code == 2, -t, tl.where(code == 3, float("nan"), t - t)))
        store_piece(dst + block * BLOCK, k * width + column, value, mask, n, ADD, WHOLE)


@triton.jit
def threshold_encode_kernel(
    src, residual, table, payload, threshold,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr, FIXED: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, padding, code, _, _, _ = program(table, ALIGNED)
    src, residual, scales, codes = src + first, residual + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        encode_blocks(
            src, residual, scales, codes, blocks, BLOCK, threshold, ROWS, BLOCK, MULTIPLE, FIXED, RESIDUAL, True
        )
    else:
        blocks = 1
        encode_blocks(
            src, residual, scales, codes, blocks, numel, threshold, 1, BLOCK, MULTIPLE, FIXED, RESIDUAL, False
        )
    if not FIXED:
        byte = tl.arange(0, 16)
        tl.store(scales + blocks * 2 + byte, tl.zeros([16], tl.uint8), mask=byte < padding)


@triton.jit
def threshold_decode_kernel(
    payload, table, dst, threshold,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, _ = program(table, ALIGNED)
    dst, scales, codes = dst + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, scales, codes, blocks, BLOCK, threshold, ROWS, BLOCK, FIXED, ADD, True)
    else:
        decode_blocks(dst, scales, codes, 1, numel, threshold, 1, BLOCK, FIXED, ADD, False)


def threshold_encode(
    src: Tensor,
    residual: Tensor | None,
    segments: Segments,
    block: int,
    threshold: float,
    multiple: float,
    payload: Tensor,
) -> None:
    """As `reference.threshold_encode`."""
    programs = programs_of(segments, block, 0 if threshold else 1, 2)
    check_flat(src, programs.numel, [residual])
    check_payload(payload, programs.payload_bytes)
    if len(programs.table):
        kept = src if residual is None else residual
        launch(
            threshold_encode_kernel, len(programs.table), src, kept, programs.table, payload, float(threshold),
            MULTIPLE=multiple, RESIDUAL=residual is not None, **_constants(programs, block, threshold),
        )  # fmt: skip


def threshold_decode(payload: Tensor, segments: Segments, block: int, threshold: float, add: bool, dst: Tensor) -> None:
    """As `reference.threshold_decode`."""
    programs = programs_of(segments, block, 0 if threshold else 1, 2)
    check_dst(dst, programs.numel, add)
    check_payload(payload, programs.payload_bytes)
    if len(programs.table):
        launch(
            threshold_decode_kernel, len(programs.table), payload, programs.table, dst, float(threshold), ADD=add,
            **_constants(programs, block, threshold),
        )  # fmt: skip


def _constants(programs: Programs, block: int, threshold: float) -> dict[str, Any]:
    """What the kernels are compiled for."""
    each = {"ROWS": blocks_each(block), "BLOCK": block, "FIXED": bool(threshold), "ALIGNED": programs.aligned}
    return {**each, "num_warps": 8 if block > 4096 else 4}
