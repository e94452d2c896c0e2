"""Residuals of error feedback in fewer bytes than float32.

int8 is the payload of QSGD at 8 bits with blocks of 128 and their largest magnitude as scale: 1.016 bytes an element.
Rounding is stochastic, so the error of a store has mean zero. The error is at most one step of the block's grid, 1/126 of the
block's largest residual. bfloat16 is rounded to nearest: the error is at most 2^-8 of each element.

A new block begins with each tensor, and where a tensor is cut.
"""

import torch
from torch import Tensor

from gradwire.core import qsgd_bytes
from gradwire.kernels import Segments, kernels_for
from gradwire.kernels.reference.numbers import equal_blocks, pack

BITS, BLOCK = 8, 128
TOP = 2 ** (BITS - 1) - 1
"""The code of zero, and the largest distance of a code from it."""


class BFloat16Store:
    """Two bytes an element."""

    def __init__(self, segments: Segments) -> None:
        self.held = torch.zeros(2 * segments.numel, dtype=torch.uint8, device=segments.device)
        self._kernels = kernels_for(segments.device.type)

    def widen(self, residual: Tensor) -> None:
        """Write the stored values to `residual` (float32)."""
        self._kernels.cast_decode(self.held, torch.bfloat16, False, residual)

    def narrow(self, residual: Tensor, random: Tensor) -> None:
        """Store `residual`, with magnitudes below 2^126."""
        self._kernels.cast_encode(residual, None, torch.bfloat16, self.held)

    def narrow_changed(self, residual: Tensor, random: Tensor) -> None:
        """Store `residual`. NaN, Inf, and values that overflow are stored as zero."""
        self.narrow(residual, random)
        self.held.view(torch.bfloat16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Int8Store:
    """A byte an element, and a bfloat16 scale for each block."""

    def __init__(self, segments: Segments) -> None:
        # kernels number blocks from a tensor's start; what is cut elsewhere shares random numbers with its neighbour
        rows = tuple(row._replace(first=row.first // BLOCK * BLOCK, bits=BITS) for row in segments.rows)
        self._segments = Segments(rows, segments.device)
        self._kernels = kernels_for(segments.device.type)
        scale_bytes, code_bytes = qsgd_bytes([(row.numel, BITS) for row in rows], BLOCK, "max")
        self.held = torch.zeros(scale_bytes + code_bytes, dtype=torch.uint8, device=segments.device)
        self._scales, self._codes = self.held[:scale_bytes].view(torch.bfloat16), self.held[scale_bytes:]
        self._codes.fill_(TOP)

    def widen(self, residual: Tensor) -> None:
        """Write the stored values to `residual` (float32)."""
        self._kernels.qsgd_decode(self.held, self._segments, BLOCK, "max", False, residual)

    def narrow(self, residual: Tensor, random: Tensor) -> None:
        """Store `residual`. A block with a magnitude of 2^126 or more is stored as zeros."""
        self._kernels.qsgd_encode(residual, None, self._segments, random, BLOCK, "max", "stochastic", self.held)
        self._scales.nan_to_num_(nan=0.0)

    def narrow_changed(self, residual: Tensor, random: Tensor) -> None:
        """Store `residual`, without rounding blocks that came from `widen`: their values are whole steps of a grid.

        The largest code of such a grid is TOP or TOP - 1 steps from zero, since a scale is at most a part in 128 above the
        block's largest magnitude. So two scales are possible.
        """
        self.narrow(residual, random)
        scale_at = code_at = 0
        for row in self._segments.rows:
            for at, count, numel in equal_blocks(row.numel, BLOCK):
                block = residual[row.offset + at : row.offset + at + count * numel].reshape(count, numel)
                size = count * -(-numel // 8) * 8
                scales, codes = self._scales[scale_at : scale_at + count], self._codes[code_at : code_at + size]
                for largest in (TOP, TOP - 1):
                    _hold_on_grid(block, largest, scales, codes.view(count, -1))
                scale_at, code_at = scale_at + count, code_at + size


def _hold_on_grid(blocks: Tensor, largest: int, scales: Tensor, codes: Tensor) -> None:
    """Write scale and codes of the rows of `blocks` that are whole steps of a grid, `largest` of them the most."""
    reach = blocks.abs().amax(dim=1, keepdim=True)
    scale = (reach.double() * TOP / largest).to(torch.bfloat16)
    step = scale.float() / TOP
    steps = (blocks / step).round()
    exact = (steps * step == blocks).all(dim=1, keepdim=True) & (steps.abs() <= TOP).all(dim=1, keepdim=True)
    scales.copy_(torch.where(exact, scale, scales.unsqueeze(1)).squeeze(1))
    codes.copy_(torch.where(exact, pack(torch.where(exact, steps, 0.0).long() + TOP, BITS), codes))


def store_for(dtype: str, segments: Segments) -> BFloat16Store | Int8Store | None:
    """The store of the residuals of these segments, at first zero; None for float32, which needs none.

    >>> from gradwire.kernels import Segment
    >>> store = store_for("int8", Segments.of([Segment(0, 4, key=1, first=0, bits=0)]))
    >>> store.narrow(torch.tensor([0.0, 127.0, -3.0, 1.0]), random=torch.tensor([0, 1, 2, 0]))
    >>> store.widen(residual := torch.empty(4))
    >>> residual
    tensor([  0., 127.,  -3.,   1.])
    """
    stores: dict[str, type[BFloat16Store] | type[Int8Store]] = {"bfloat16": BFloat16Store, "int8": Int8Store}
    return stores[dtype](segments) if dtype in stores else None
