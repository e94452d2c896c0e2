"""Sums and means in the order of the reference, which gives the same bits on every machine.

The means of whole runs take two launches before the launch of their signs. The first launch sums pieces of 8192 elements. The
second one, a program for each run, adds up the sums of the run's pieces in their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import HUGE, load_value, load_weighted, store_scale
from gradwire.kernels.triton.launch import launch, made_once, table_of
from gradwire.kernels.triton.numbers import magnitude, narrow_u16

LANES = tl.constexpr(64)
LARGEST = tl.constexpr(2.0**128 - 2.0**120)  # the largest bfloat16
PIECE = tl.constexpr(8192)
"""Elements that are summed as float32; the sums of pieces are added up as float64."""
PIECES = tl.constexpr(4)
"""Pieces of a program."""
AT_ONCE = tl.constexpr(8)
"""Loads that a program has on their way at once."""


@triton.jit
def folded(lanes, ROWS: tl.constexpr):
    """The sums of ROWS x 64 lanes, folded in halves, as float64."""
    for fold in tl.static_range(6):
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 32 >> fold]), axis=1)
    return tl.reshape(lanes, [ROWS]).to(tl.float64)


@triton.jit
def sum_of(
    src, residual, weights, row, blocks, n, by,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """float64 sums of the magnitudes of ROWS blocks, or of the squares of `by` times the values: element i is added to lane
    i % 64 in float32."""
    lane, block = tl.arange(0, LANES)[None, :], row[:, None]
    total = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(0, n, LANES):
        inside = (at + lane < n) & (block < blocks)
        value = load_weighted(src, residual, weights, block * BLOCK + at + lane, inside, RESIDUAL, WEIGHTED)
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


@triton.jit
def negative(value, MEANS: tl.constexpr):
    """Whether a float32 goes out as negative: by its sign bit, but that of signs alone -0.0 is not."""
    below = value.to(tl.int32, bitcast=True) < 0
    if MEANS == 0:
        below &= magnitude(value) > 0
    return below


@triton.jit
def store_mean(at, total, count, finite, present):
    mean = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    # a sum of 0.0 and -0.0 is 0.0, but a GPU's compiler drops the 0.0 that a short sum begins with
    raw = tl.where(total == 0, 0, narrow_u16(tl.where(finite, mean, 0.0), True).to(tl.int32))
    store_scale(at, tl.where(finite, raw, 0x7FC0), present)


@triton.jit
def add_signed(above, under, below, value, MEANS: tl.constexpr):
    """(sum of what is at least zero or, with one mean, of magnitudes; sum of what is below; how many are below), with `value`."""
    if MEANS == 1:
        above += tl.abs(value)
    else:
        above += tl.where(value < 0, 0.0, value)
        under += tl.where(value < 0, value, 0.0)
        below += negative(value, MEANS).to(tl.int32)
    return above, under, below


@triton.jit
def store_means(at, above, under, below, numel, present, MEANS: tl.constexpr):
    """The means of `numel` elements, from their sums as float64 and how many are below zero."""
    finite = (above < 2.0**126) & (-under < 2.0**126)
    store_mean(at, above, numel - below, finite, present)
    if MEANS == 2:
        store_mean(at + 2, under, below, finite, present)


@triton.jit
def piece_sums_kernel(src, residual, table, sums, counts, MEANS: tl.constexpr, RESIDUAL: tl.constexpr):
    """The sums of `add_signed` by piece."""
    row = table + tl.program_id(0) * 3
    first, numel, place = tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2)
    piece, lane = tl.arange(0, PIECES)[:, None], tl.arange(0, LANES)[None, :]
    above, under = tl.zeros([PIECES, LANES], tl.float32), tl.zeros([PIECES, LANES], tl.float32)
    below = tl.zeros([PIECES, LANES], tl.int32)
    for start in range(0, tl.minimum(numel, PIECE), LANES * AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            i = piece * PIECE + start + k * LANES + lane
            value = load_value(src + first, residual + first, i, i < numel, RESIDUAL)
            above, under, below = add_signed(above, under, below, value, MEANS)
    index = tl.arange(0, PIECES)
    present = index * PIECE < numel
    tl.store(sums + (place + index) * 2, folded(above, PIECES), mask=present)
    tl.store(sums + (place + index) * 2 + 1, folded(under, PIECES), mask=present)
    tl.store(counts + place + index, tl.sum(below, axis=1), mask=present)


@triton.jit
def run_means_kernel(sums, counts, table, payload, MEANS: tl.constexpr):
    """The means of one run from the sums of its pieces."""
    row, one = table + tl.program_id(0) * 4, tl.arange(0, 1)
    piece, pieces, numel, scale = tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3)
    sums, counts = sums + piece * 2, counts + piece
    above, under, below = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64), tl.zeros([1], tl.int64)
    for start in range(0, pieces, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            at = start + k + one
            above += tl.load(sums + at * 2, mask=at < pieces, other=0.0)
            if MEANS == 2:
                under += tl.load(sums + at * 2 + 1, mask=at < pieces, other=0.0)
                below += tl.load(counts + at, mask=at < pieces, other=0)
    store_means(payload + scale + one, above, under, below, numel, one == 0, MEANS)


class _Tables(NamedTuple):
    programs: Tensor
    """int64 of shape (programs, 3): first element; elements; first piece."""
    runs: Tensor
    """int64 of shape (runs, 4): first piece; pieces; elements; byte of its means."""
    pieces: int


def store_run_means(src: Tensor, residual: State, segments: Segments, means: int, payload: Tensor) -> None:
    """Write the means of src (+ residual) of every run where the payload of `mean_sign_encode` has them."""
    made = _tables(segments, means)
    if made.pieces:
        sums = torch.empty(2 * made.pieces, dtype=torch.float64, device=src.device)
        counts = torch.empty(made.pieces, dtype=torch.int32, device=src.device)
        launch(
            piece_sums_kernel, len(made.programs), src, residual, made.programs, sums, counts, MEANS=means,
            RESIDUAL=residual is not None,
        )  # fmt: skip
        launch(run_means_kernel, len(made.runs), sums, counts, made.runs, payload, MEANS=means, num_warps=1)


@made_once
def _tables(segments: Segments, means: int) -> _Tables:
    programs: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    piece = 0
    each = PIECES.value * PIECE.value
    for row in segments.rows:
        if row.numel:
            pieces = -(-row.numel // PIECE.value)
            runs.append((piece, pieces, row.numel, 2 * means * len(runs)))
            for at in range(0, row.numel, each):
                programs.append((row.offset + at, min(each, row.numel - at), piece + at // PIECE.value))
            piece += pieces
    return _Tables(table_of(programs, 3, segments), table_of(runs, 4, segments), piece)
