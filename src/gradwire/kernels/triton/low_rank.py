"""PowerSGD's products, in full float32, and the orthonormal columns between them: one launch each for all matrices, two to
reconstruct. M is src + residual, never stored. The host knows no matrix's size without waiting for the device, so a launch has
as many programs for each matrix as the largest could use, and these share its tiles.

Sums are taken in another order than the reference's, which depends on nothing but the sizes. `reconstruct` adds in the order of
the C++ kernels and has their bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import State
from gradwire.kernels.triton.blocks import load_value
from gradwire.kernels.triton.launch import check_flat, launch
from gradwire.kernels.triton.numbers import magnitude, narrow, random_hash

HEIGHT, WIDTH = 32, 32
"""Rows and columns of a tile."""
COLUMNS = 16
"""Columns of P at a time: the least that tl.dot takes. With more of them, or larger tiles, registers do not hold a product."""
PROGRAMS = 256
"""The largest number of programs of a matrix."""


@triton.jit
def matrix_program(matrices):
    """(offset, rows, columns, first number of P, first number of Q) of this program's matrix."""
    row = matrices + tl.program_id(0) * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def load_tile(src, residual, columns, i, j, inside, RESIDUAL: tl.constexpr):
    return load_value(src, residual, i[:, None] * columns + j[None, :], inside, RESIDUAL)


@triton.jit
def project_kernel(
    src, residual, matrices, rank, q, p,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """P = M Q' of HEIGHT rows at a time; RANK: columns of P at a time."""
    offset, rows, columns, p_at, q_at = matrix_program(matrices)
    k = tl.program_id(2) * RANK + tl.arange(0, RANK)
    for first in range(tl.program_id(1) * HEIGHT, rows, tl.num_programs(1) * HEIGHT):
        i = first + tl.arange(0, HEIGHT)
        total = tl.zeros([HEIGHT, RANK], tl.float32)
        for start in range(0, columns, WIDTH):
            j = start + tl.arange(0, WIDTH)
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            tile = load_tile(src + offset, residual + offset, columns, i, j, inside, RESIDUAL)
            at = q_at + k[None, :] * columns + j[:, None]
            right = tl.load(q + at, mask=(j < columns)[:, None] & (k < rank)[None, :], other=0.0)
            total = tl.dot(tile, right, total, input_precision="ieee")
        to = p + p_at + i[:, None] * rank + k[None, :]
        tl.store(to, total, mask=(i < rows)[:, None] & (k < rank)[None, :])


@triton.jit
def back_project_kernel(
    src, residual, matrices, rank, p, q,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Q = P' M of WIDTH columns at a time."""
    offset, rows, columns, p_at, q_at = matrix_program(matrices)
    k = tl.program_id(2) * RANK + tl.arange(0, RANK)
    for first in range(tl.program_id(1) * WIDTH, columns, tl.num_programs(1) * WIDTH):
        j = first + tl.arange(0, WIDTH)
        total = tl.zeros([RANK, WIDTH], tl.float32)
        for start in range(0, rows, HEIGHT):
            i = start + tl.arange(0, HEIGHT)
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            tile = load_tile(src + offset, residual + offset, columns, i, j, inside, RESIDUAL)
            at = p_at + i[None, :] * rank + k[:, None]
            left = tl.load(p + at, mask=(i < rows)[None, :] & (k < rank)[:, None], other=0.0)
            total = tl.dot(left, tile, total, input_precision="ieee")
        to = q + q_at + k[:, None] * columns + j[None, :]
        tl.store(to, total, mask=(k < rank)[:, None] & (j < columns)[None, :])


@triton.jit
def all_finite(at, count, TILE: tl.constexpr):
    """Whether all of so many float32 are finite."""
    i, most = tl.arange(0, TILE), tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        most = tl.maximum(most, magnitude(tl.load(at + start + i, mask=start + i < count, other=0.0)))
    return tl.max(most) < 0x7F800000


@triton.jit
def finite_kernel(matrices, rank, q, finite, TILE: tl.constexpr):
    """Whether the Q of each matrix is finite."""
    _, _, columns, _, q_at = matrix_program(matrices)
    tl.store(finite + tl.program_id(0), all_finite(q + q_at, rank * columns, TILE).to(tl.int32))


@triton.jit
def reconstruct_kernel(
    dst, residual, matrices, rank, p, q_sum, q_own, finite,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dst = P Q of all ranks, and the residual less P Q of this one, tile by tile."""
    offset, rows, columns, p_at, q_at = matrix_program(matrices)
    across = (columns + WIDTH - 1) // WIDTH
    tiles = (rows + HEIGHT - 1) // HEIGHT * across
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        i, j = tile // across * HEIGHT + tl.arange(0, HEIGHT), tile % across * WIDTH + tl.arange(0, WIDTH)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        total, own = tl.zeros([HEIGHT, WIDTH], tl.float32), tl.zeros([HEIGHT, WIDTH], tl.float32)
        for k in range(0, rank):
            left = tl.load(p + p_at + i * rank + k, mask=i < rows, other=0.0)[:, None]
            at = q_at + k * columns + j
            total += left * tl.load(q_sum + at, mask=j < columns, other=0.0)[None, :]
            if RESIDUAL:
                own += left * tl.load(q_own + at, mask=j < columns, other=0.0)[None, :]
        at = offset + i[:, None] * columns + j[None, :]
        if RESIDUAL:
            carried_rows = tl.where(tl.load(finite + tl.program_id(0)) != 0, rows, 0)
            carried = (i < carried_rows)[:, None] & (j < columns)[None, :]
            tl.store(residual + at, load_value(dst, residual, at, carried, True) - own, mask=carried)
        tl.store(dst + at, narrow(total, dst.dtype.element_ty), mask=inside)


@triton.jit
def dot_of(p, rows, rank, a, b, TILE: tl.constexpr):
    """The dot product of two columns, in double precision."""
    i, total = tl.arange(0, TILE), tl.zeros([TILE], tl.float64)
    for start in range(0, rows, TILE):
        at, inside = p + (start + i) * rank, start + i < rows
        x, y = tl.load(at + a, mask=inside, other=0.0), tl.load(at + b, mask=inside, other=0.0)
        total += x.to(tl.float64) * y.to(tl.float64)
    return tl.sum(total)


@triton.jit
def clear_of_others(p, rows, rank, k, TILE: tl.constexpr):
    """Take from column k what it has of those before it."""
    i = tl.arange(0, TILE)
    for other in range(0, k):
        along = dot_of(p, rows, rank, other, k, TILE)
        for start in range(0, rows, TILE):
            at, inside = p + (start + i) * rank, start + i < rows
            x = tl.load(at + k, mask=inside, other=0.0).to(tl.float64)
            y = tl.load(at + other, mask=inside, other=0.0).to(tl.float64)
            tl.store(at + k, (x - along * y).to(tl.float32), mask=inside)
        tl.debug_barrier()  # what one thread wrote another reads next


@triton.jit
def scale_to_one(p, rows, rank, k, least, TILE: tl.constexpr):
    """Bring column k to length one if it is longer than `least`, and say whether it was."""
    norm, i = tl.sqrt(dot_of(p, rows, rank, k, k, TILE)), tl.arange(0, TILE)
    whole = norm > least
    for start in range(0, tl.where(whole, rows, 0), TILE):
        at, inside = p + (start + i) * rank + k, start + i < rows
        x = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        tl.store(at, (x / norm).to(tl.float32), mask=inside)
    tl.debug_barrier()
    return whole


@triton.jit
def orthogonalise_kernel(matrices, rank, p, TILE: tl.constexpr):
    """Gram and Schmidt's way, each column cleared of the others twice. A column of which nothing is left is replaced by one of
    pseudo-random signs."""
    _, rows, _, p_at, _ = matrix_program(matrices)
    p, i = p + p_at, tl.arange(0, TILE)
    if all_finite(p, rows * rank, TILE):
        tl.debug_barrier()
        for k in range(0, rank):
            whole = scale_to_one(p, rows, rank, k, 0.0, TILE)
            if whole:
                clear_of_others(p, rows, rank, k, TILE)
                whole = scale_to_one(p, rows, rank, k, 1e-6, TILE)
            attempt = 0
            while whole == 0:
                key = (tl.full([1], 0, tl.uint64) + attempt << 32) + k
                for start in range(0, rows, TILE):
                    sign = (random_hash((start + i).to(tl.uint32), key) & 1).to(tl.float32) * 2 - 1
                    tl.store(p + (start + i) * rank + k, sign, mask=start + i < rows)
                tl.debug_barrier()
                scale_to_one(p, rows, rank, k, 0.0, TILE)
                clear_of_others(p, rows, rank, k, TILE)
                whole = scale_to_one(p, rows, rank, k, 1e-3, TILE)
                attempt += 1
            clear_of_others(p, rows, rank, k, TILE)
            scale_to_one(p, rows, rank, k, 0.0, TILE)
    else:
        tl.debug_barrier()
        for start in range(0, rows * rank, TILE):
            missing = tl.full([TILE], float("nan"), tl.float32)
            tl.store(p + start + i, missing, mask=start + i < rows * rank)


def project(src: Tensor, residual: State, matrices: Tensor, rank: int, q: Tensor, p: Tensor) -> None:
    _product(project_kernel, src, residual, matrices, rank, q, p, HEIGHT)


def back_project(src: Tensor, residual: State, matrices: Tensor, rank: int, p: Tensor, q: Tensor) -> None:
    _product(back_project_kernel, src, residual, matrices, rank, p, q, WIDTH)


def orthogonalise(matrices: Tensor, rank: int, p: Tensor) -> None:
    """`reference.orthogonalise`, with one program for each matrix."""
    launch(orthogonalise_kernel, len(matrices), matrices, rank, p, TILE=1024)


def reconstruct(dst: Tensor, residual: State, matrices: Tensor, rank: int, p: Tensor, q_sum: Tensor, q_own: Tensor) -> None:
    check_flat(dst, 0, [residual])
    if len(matrices):
        finite = torch.empty(len(matrices), dtype=torch.int32, device=dst.device)
        programs = _programs(dst.numel(), HEIGHT * WIDTH)
        launch(finite_kernel, len(matrices), matrices, rank, q_sum, finite, TILE=1024)
        launch(
            reconstruct_kernel, (len(matrices), programs), dst, residual, matrices, rank, p, q_sum, q_own,
            finite, HEIGHT=HEIGHT, WIDTH=WIDTH, RESIDUAL=residual is not None,
        )  # fmt: skip


def _programs(numel: int, each: int) -> int:
    """Programs of each matrix, if all of so many elements could be one's."""
    return max(1, min(PROGRAMS, -(-numel // each)))


def _product(
    kernel: Any, src: Tensor, residual: State, matrices: Tensor, rank: int, given: Tensor, out: Tensor, each: int
) -> None:
    """Launch a kernel of products. each: the rows or columns of a tile of `out`."""
    check_flat(src, 0, [residual])
    if len(matrices):
        launch(
            kernel, (len(matrices), _programs(out.numel() // rank, each), triton.cdiv(rank, COLUMNS)), src,
            residual, matrices, rank, given, out,
            HEIGHT=HEIGHT, WIDTH=WIDTH, RANK=COLUMNS, RESIDUAL=residual is not None,
        )  # fmt: skip
