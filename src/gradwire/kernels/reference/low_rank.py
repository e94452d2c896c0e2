"""PowerSGD's products. `matrices` is int64 of shape (count, 5): offset, rows, columns, first number of P, first number of Q.

M is src + residual, row after row in the flat buffer. P has shape (rows, rank), Q has shape (rank, columns), both row after row.
Sums differ from those of other kernels in their last bits, because torch adds in another order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.segments import State


class _Matrix(NamedTuple):
    run: slice
    rows: int
    columns: int
    p: slice
    q: slice


def _each(matrices: Tensor, rank: int) -> Iterator[_Matrix]:
    for offset, rows, columns, p_at, q_at in matrices.tolist():
        spans = (offset, rows * columns), (p_at, rows * rank), (q_at, columns * rank)
        run, p, q = (slice(at, at + n) for at, n in spans)
        yield _Matrix(run, rows, columns, p, q)


def _whole(src: Tensor, residual: State, m: _Matrix) -> Tensor:
    x = src[m.run].to(torch.float32)
    return (x if residual is None else x + residual[m.run]).view(m.rows, m.columns)


def project(src: Tensor, residual: State, matrices: Tensor, rank: int, q: Tensor, p: Tensor) -> None:
    """Compute P = M Q' for every matrix."""
    for m in _each(matrices, rank):
        p[m.p] = (_whole(src, residual, m) @ q[m.q].view(rank, m.columns).T).reshape(-1)


def back_project(src: Tensor, residual: State, matrices: Tensor, rank: int, p: Tensor, q: Tensor) -> None:
    """Compute Q = P' M for every matrix."""
    for m in _each(matrices, rank):
        q[m.q] = (p[m.p].view(m.rows, rank).T @ _whole(src, residual, m)).reshape(-1)


def orthogonalise(matrices: Tensor, rank: int, p: Tensor) -> None:
    """Make the columns of each P orthonormal. They span at least the same space. A P that is not finite becomes NaN."""
    for m in _each(matrices, rank):
        columns = p[m.p].view(m.rows, rank).double()
        if bool(columns.isfinite().all()):
            p[m.p] = torch.linalg.qr(columns).Q.to(torch.float32).reshape(-1)
        else:
            p[m.p] = torch.nan


def reconstruct(dst: Tensor, residual: State, matrices: Tensor, rank: int, p: Tensor, q_sum: Tensor, q_own: Tensor) -> None:
    """Compute dst = P times the sum of Q, and residual = M - P times the own Q. The residual keeps its values if the sum is not
    finite."""
    for m in _each(matrices, rank):
        left = p[m.p].view(m.rows, rank)
        if residual is not None and bool(q_sum[m.q].isfinite().all()):
            own = left @ q_own[m.q].view(rank, m.columns)
            residual[m.run] = (_whole(dst, residual, m) - own).reshape(-1)
        dst[m.run] = (left @ q_sum[m.q].view(rank, m.columns)).reshape(-1).to(dst.dtype)
