"""PowerSGD's products. `matrices` is int64 of shape (count, 5): offset, rows, columns, first number of P, first number of Q.

M is src + residual, a matrix row after row in the flat buffer. P is rows x rank, row after row; Q is rank rows of `columns`.
Sums differ from the kernels' in their last bits: the order of adding is torch's here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _Matrix(NamedTuple):
    run: slice
    rows: int
    columns: int
    p: slice
    q: slice


def _each(matrices: Tensor, rank: int) -> Iterator[_Matrix]:
    for offset, rows, columns, p_at, q_at in matrices.tolist():
        run, p, q = (
            slice(at, at + n) for at, n in ((offset, rows * columns), (p_at, rows * rank), (q_at, columns * rank))
        )
        yield _Matrix(run, rows, columns, p, q)


def _whole(src: Tensor, residual: Tensor | None, m: _Matrix) -> Tensor:
    x = src[m.run].to(torch.float32)
    return (x if residual is None else x + residual[m.run]).view(m.rows, m.columns)


def project(src: Tensor, residual: Tensor | None, matrices: Tensor, rank: int, q: Tensor, p: Tensor) -> None:
    """P = M Q', of every matrix."""
    for m in _each(matrices, rank):
        p[m.p] = (_whole(src, residual, m) @ q[m.q].view(rank, m.columns).T).reshape(-1)


def back_project(src: Tensor, residual: Tensor | None, matrices: Tensor, rank: int, p: Tensor, q: Tensor) -> None:
    """Q = P' M, of every matrix."""
    for m in _each(matrices, rank):
        q[m.q] = (p[m.p].view(m.rows, rank).T @ _whole(src, residual, m)).reshape(-1)


def orthogonalise(matrices: Tensor, rank: int, p: Tensor) -> None:
    """Make the columns of each P orthonormal; they span at least what they did. A P that is not finite becomes NaN."""
    for m in _each(matrices, rank):
        columns = p[m.p].view(m.rows, rank).double()
        if bool(columns.isfinite().all()):
            p[m.p] = torch.linalg.qr(columns).Q.to(torch.float32).reshape(-1)
        else:
            p[m.p] = torch.nan


def reconstruct(
    dst: Tensor, residual: Tensor | None, matrices: Tensor, rank: int, p: Tensor, q_sum: Tensor, q_own: Tensor
) -> None:
    """dst = P Q of all ranks; residual = M less P Q of this one, unless Q is not finite: then it stays what it was."""
    for m in _each(matrices, rank):
        left = p[m.p].view(m.rows, rank)
        if residual is not None and bool(q_sum[m.q].isfinite().all()):
            own = left @ q_own[m.q].view(rank, m.columns)
            residual[m.run] = (_whole(dst, residual, m) - own).reshape(-1)
        dst[m.run] = (left @ q_sum[m.q].view(rank, m.columns)).reshape(-1).to(dst.dtype)
