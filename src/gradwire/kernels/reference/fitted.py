"""Levels whose scale is fitted to the block by least squares. The error of a block is then orthogonal to what is sent, so that
error feedback does not enlarge what is sent.

    uniform, 2 to 4 bits      levels 0, 1, .. L with L = 2^(b-1) - 1       scale L * unit; the payload of QSGD with scale 'max'
    lloyd, 2 to 4 bits        2^(b-1) levels of either sign, no zero       scale = unit

The levels of Lloyd and Max have the least squared error for a normal distribution with variance 1. Here they are multiples of
1/1024. A code of lloyd has the number of the level and, above it, the sign.

A first unit is a multiple of the block's mean magnitude (2 bits) or of its largest magnitude. Each element gets the level m that
is nearest with this unit; larger ones get the last. The unit that is sent, as the nearest bfloat16 to its scale, is

    sum(|v| * m) / sum(m * m)

The multiples have the least error for normal and Laplace distributions together. A block is not finite if its sum of magnitudes
(2 bits) or its largest magnitude is 2^110 or more.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import TINY, bf16_value, bits_of, narrow
from gradwire.kernels.reference.qsgd import UniformLevels
from gradwire.kernels.reference.scaled import Coder, scaled_decode, scaled_encode
from gradwire.kernels.reference.signs import block_sums
from gradwire.kernels.segments import Segments, State

LARGE = 2.0**110  # from here on the sums of a block could overflow
FIRST = {"uniform": {2: 1.7, 3: 0.227, 4: 0.124}, "lloyd": {2: 1.375, 3: 0.351, 4: 0.34}}
"""The first unit of a block over its mean magnitude (2 bits) or its largest magnitude."""
LLOYD = {2: (464, 1547), 3: (251, 774, 1376, 2204), 4: (131, 397, 673, 965, 1286, 1657, 2119, 2798)}
"""Levels by bits, times 1024."""


class _Fitted(Coder):
    width = 0

    def __init__(self, levels: str, weights: State) -> None:
        self.levels, self.ternary, self.weights = levels, levels == "uniform", weights

    def finite(self, v: Tensor, bits: int) -> Tensor:
        return self._statistic(v, bits) < LARGE  # false for NaN too

    def scales(self, v: Tensor, bits: int) -> Tensor:
        size = v.abs()
        nearest = self._magnitudes(v, bits)[self._numbers(size, self._first_unit(v, bits), bits)]
        squares = block_sums(nearest * nearest)
        fitted = block_sums(size * nearest) / torch.where(squares == 0, 1.0, squares)
        units = 1 if self.levels == "lloyd" else (1 << (bits - 1)) - 1
        scale = (fitted * units).to(torch.float32).unsqueeze(1)
        return torch.where(scale >= TINY, bits_of(narrow(scale, torch.bfloat16).to(torch.float32)) >> 16, 0)

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        unit = torch.where(raw == 0, float("inf"), self._first_unit(v, bits))
        number = self._numbers(v.abs(), unit, bits)
        if self.levels == "lloyd":
            return number | torch.signbit(v).to(torch.int64) << (bits - 1)
        return (1 << (bits - 1)) - 1 + torch.where(v < 0, -number, number)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        if self.levels == "uniform":
            return UniformLevels("max").values(codes, raw, bits)
        size = self._magnitudes(codes, bits)[codes & ((1 << (bits - 1)) - 1)] * bf16_value(raw)
        return torch.where(codes >> (bits - 1) == 1, -size, size)

    def _magnitudes(self, like: Tensor, bits: int) -> Tensor:
        """The levels of one sign, in units, ascending."""
        if self.levels == "lloyd":
            return torch.tensor(LLOYD[bits], dtype=torch.float32, device=like.device) / 1024.0
        return torch.arange(1 << (bits - 1), dtype=torch.float32, device=like.device)

    def _statistic(self, v: Tensor, bits: int) -> Tensor:
        """The sum (2 bits) or the largest of the magnitudes of each row of v, float64."""
        return (block_sums(v.abs()) if bits == 2 else v.abs().amax(dim=1).double()).unsqueeze(1)

    def _first_unit(self, v: Tensor, bits: int) -> Tensor:
        first = FIRST[self.levels][bits] / (v.shape[1] if bits == 2 else 1)
        return (self._statistic(v, bits) * first).to(torch.float32)

    def _numbers(self, size: Tensor, unit: Tensor, bits: int) -> Tensor:
        """The numbers of the levels that are nearest to magnitudes, the lower one of two."""
        levels = self._magnitudes(size, bits)
        bounds = unit * ((levels[1:] + levels[:-1]) / 2)
        return (size.unsqueeze(2) > bounds.unsqueeze(1)).sum(dim=2)


def fitted_encode(
    src: Tensor, residual: State, segments: Segments, weights: State, block: int, levels: str, payload: Tensor
) -> None:
    """Encode as `scaled_encode` does; levels is 'uniform' or 'lloyd'. Weights (uint8, flat) take a residual."""
    scaled_encode(_Fitted(levels, weights), src, residual, segments, None, block, payload)


def fitted_decode(payload: Tensor, segments: Segments, weights: State, block: int, levels: str, add: bool, dst: Tensor) -> None:
    """Decode as `scaled_decode` does."""
    scaled_decode(_Fitted(levels, weights), payload, segments, block, add, dst)
