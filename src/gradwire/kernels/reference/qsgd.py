"""QSGD's uniform levels. The scale of a block is a bound of its values: a bfloat16, rounded away from zero. 'minmax' has two
scales. Codes are computed in fixed point with 16 fractional bits:

    code = (int((x - base) * inverse + origin) + u) >> 16        u uniform in 0..65535; 32768 rounds to nearest
    value = base + (code - zero) * step
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import TINY, bf16_towards, bf16_up, bf16_value, bits_of, norms
from gradwire.kernels.reference.scaled import Coder, scaled_decode, scaled_encode
from gradwire.kernels.segments import Segments, State

SHORT = 1.0 - 2.0**-22  # keeps the largest value from rounding past the largest code


class UniformLevels(Coder):
    """Levels in equal steps."""

    width = 0

    def __init__(self, scale: str) -> None:
        self.scale, self.per_block = scale, 2 if scale == "minmax" else 1
        self.ternary = scale != "minmax"

    def scales(self, v: Tensor, bits: int) -> Tensor:
        """Bits of the bfloat16 scales of the rows of v, int64 of shape (rows, 1 or 2)."""
        if self.scale == "minmax":
            low, high = v.amin(dim=1), v.amax(dim=1)
            # the minimum and maximum as bit patterns: -0.0 is below 0.0
            low = torch.where((low == 0) & ((v == 0) & torch.signbit(v)).any(dim=1), -0.0, low)
            high = torch.where((high == 0) & ((v == 0) & ~torch.signbit(v)).any(dim=1), 0.0, high)
            return torch.stack([bf16_towards(low, up=False), bf16_towards(high, up=True)], dim=1)
        most = 2.0**128 - 2.0**120
        bound = v.abs().amax(dim=1) if self.scale == "max" else norms(v).clamp(max=most).to(torch.float32)
        return torch.where(bound >= TINY, bf16_up(bits_of(bound)), 0).unsqueeze(1)

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        grid = _level_grid(raw, bits)
        fixed = ((v - grid.base) * grid.inverse + grid.origin).nan_to_num(0.0).to(torch.int32).to(torch.int64)
        return (fixed + u) >> 16

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        grid = _level_grid(raw, bits)
        return (codes - grid.zero).to(torch.float32) * grid.step + grid.base


class _LevelGrid(NamedTuple):
    """How the values of a block map to codes; tensors of shape (blocks, 1)."""

    base: Tensor
    inverse: Tensor
    origin: float
    zero: int
    step: Tensor


def _level_grid(raw: Tensor, bits: int) -> _LevelGrid:
    value = bf16_value(raw)
    if raw.shape[1] == 2:
        top, base, span = (1 << bits) - 1, value[:, :1], value[:, 1:] - value[:, :1]
        origin, zero = 0.0, 0
    else:
        top, base, span = (1 << (bits - 1)) - 1, torch.zeros_like(value), value
        origin, zero = top * 65536.0, top
    factor = torch.tensor(top * (65536.0 * SHORT), dtype=torch.float32, device=span.device)
    return _LevelGrid(base, torch.where(span >= TINY, factor / span, 0.0), origin, zero, span / float(top))


def levels_encode(
    levels: Callable[[str], Coder],
    src: Tensor,
    residual: State,
    segments: Segments,
    stream: Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: Tensor,
) -> None:
    """Encode as `scaled_encode` does; scale is 'max', 'minmax' or 'l2', rounding 'stochastic' or 'nearest'."""
    drawn = stream if rounding == "stochastic" else None
    scaled_encode(levels(scale), src, residual, segments, drawn, block, payload)


qsgd_encode = partial(levels_encode, UniformLevels)


def qsgd_decode(payload: Tensor, segments: Segments, block: int, scale: str, add: bool, dst: Tensor) -> None:
    """Decode as `scaled_decode` does; scale is 'max', 'minmax' or 'l2'."""
    scaled_decode(UniformLevels(scale), payload, segments, block, add, dst)
