"""Sums over blocks in the order of the reference, which gives the same bits on every machine."""

import triton
import triton.language as tl

from gradwire.kernels.triton.blocks import HUGE, load_value
from gradwire.kernels.triton.numbers import magnitude

LANES = tl.constexpr(64)
LARGEST = tl.constexpr(2.0**128 - 2.0**120)  # the largest bfloat16


@triton.jit
def folded(lanes, ROWS: tl.constexpr):
    """The sums of ROWS x 64 lanes, folded in halves, as float64."""
    for fold in tl.static_range(6):
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 32 >> fold]), axis=1)
    return tl.reshape(lanes, [ROWS]).to(tl.float64)


@triton.jit
def sum_of(
    src, residual, row, blocks, n, by,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """float64 sums of the magnitudes of ROWS blocks, or of the squares of `by` times the values: element i is added to lane
    i % 64 in float32."""
    lane, block = tl.arange(0, LANES)[None, :], row[:, None]
    total = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(0, n, LANES):
        inside = (at + lane < n) & (block < blocks)
        value = load_value(src, residual, block * BLOCK + at + lane, inside, RESIDUAL)
        if SQUARES:
            value = value * by[:, None]
            total += value * value
        else:
            total += tl.abs(value)
    tl.debug_barrier()  # a thread may change the residual only after all have read it here
    return folded(total, ROWS)


@triton.jit
def norm_of(src, residual, row, blocks, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """float32 bits of the l2 norms of ROWS blocks: 16 lanes of float64 sums, folded, in the reference's order."""
    lane, block = tl.arange(0, 16)[None, :], row[:, None]
    total = tl.zeros([ROWS, 16], tl.float64)
    for at in range(0, n, 16):
        inside = (at + lane < n) & (block < blocks)
        value = load_value(src, residual, block * BLOCK + at + lane, inside, RESIDUAL)
        wide = tl.where(magnitude(value) < HUGE, value, 0.0).to(tl.float64)
        total += wide * wide
    for fold in tl.static_range(4):
        total = tl.sum(tl.reshape(total, [ROWS, 2, 8 >> fold]), axis=1)
    norm = tl.minimum(tl.sqrt(tl.reshape(total, [ROWS])), LARGEST).to(tl.float32)
    tl.debug_barrier()  # a thread may change the residual only after all have read it here
    return magnitude(norm)
