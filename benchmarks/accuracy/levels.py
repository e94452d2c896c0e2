"""A codec for comparisons, in plain torch: a few levels, and the scale with the least squared error of each block.

The error of such a scale is orthogonal to the decoded values. So under feedback the energy of what is sent is that of the
gradients. Levels are those with the least error for normal values (Lloyd 1982; Max 1960).
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.compressors import Compressor, Context
from gradwire.core.specs.base import BlockSpec, ElementRun, Law, check_block
from gradwire.errors import SpecError
from gradwire.kernels import Segments

__all__ = ["Levels", "LevelsCompressor", "lloyd_levels"]

PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    3: ((3, 5),),
    4: ((4, 4),),
    7: ((2, 8), (4, 4)),
    8: ((2, 8), (4, 4)),
    15: ((16, 2),),
    16: ((16, 2),),
}
"""The digits of a code by the number of levels, lowest first: how many values a digit has, and how many fit into a byte."""


class Levels(BlockSpec, frozen=True):
    """Least-squares levels: for comparisons of codecs, not for use. Not registered, so that no list of specs has it."""

    id: ClassVar[str] = "accuracy_levels"
    compressor: ClassVar[Any] = "benchmarks.accuracy.levels:LevelsCompressor"
    law: ClassVar[Law] = Law("contractive")

    count: int = 3
    """Levels of the first encode."""
    of_sum: int = 0
    """Levels of the encode of the sum; 0: as many as in the first."""
    block: int = 128
    """Elements that share one scale."""
    fits: int = 1
    """How often the scale is fitted to the codes, and the codes to the scale, before the last time."""

    def __post_init__(self) -> None:
        check_block(self.block)
        for count in (self.count, self.of_sum or self.count):
            if count not in PLANES:
                raise SpecError(f"a block has {count} levels: it must be one of {', '.join(map(str, PLANES))}.")

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        blocks = sum(-(-run.numel // self.block) for run in runs)
        return blocks * max(self.bytes_of_blocks())  # a wrapper asks the spec of the first encode for both

    def bytes_of_blocks(self) -> list[int]:
        """Bytes of a block in the first encode and in that of the sum."""
        counts = self.count, self.of_sum or self.count
        return [2 + sum(-(-self.block // per_byte) for _, per_byte in PLANES[count]) for count in counts]


@cache
def lloyd_levels(count: int) -> Tensor:
    """Ascending levels with the least squared error for normal values of variance 1, float32.

    >>> lloyd_levels(4)
    tensor([-1.5104, -0.4528,  0.4528,  1.5104])
    """
    normal = NormalDist()
    levels = [2 * (2 * each + 1) / count - 2 for each in range(count)]
    for _ in range(3000):
        edges = [-40.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
        levels = [(normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low)) for low, high in pairwise(edges)]
    return torch.tensor(levels)


class LevelsCompressor(Compressor):
    """Encodes finite values. The code of a value is twice the number of its magnitude, plus one for negative values.
    Where zero is a level the code is one less, and zero has code 0."""

    spec: Levels

    def __init__(self, spec: Levels) -> None:
        super().__init__(spec)
        magnitudes = lloyd_levels(spec.count)[spec.count // 2 :]
        self._magnitudes: list[float] = magnitudes.tolist()
        self._edges: list[float] = ((magnitudes[1:] + magnitudes[:-1]) / 2).tolist()
        self._zero = spec.count % 2
        by_code = torch.stack([magnitudes, -magnitudes], 1).flatten()[self._zero :]
        if len(PLANES[spec.count]) == 1:
            self._tables = [_unpacked(by_code, *PLANES[spec.count][0])]
        else:  # a sign and a magnitude
            signs = torch.tensor([1.0, -1.0])
            self._tables = [
                _unpacked(values, *plane) for values, plane in zip((signs, magnitudes), PLANES[spec.count], strict=True)
            ]

    def for_sum(self) -> Compressor:
        count = self.spec.of_sum or self.spec.count
        return self if count == self.spec.count else LevelsCompressor(Levels(count, 0, self.spec.block, self.spec.fits))

    def encode(self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor) -> None:
        given = src.float() + state[0] if state else src.float()
        values = self._in_blocks(given, segments)
        size = values.abs()
        scales, numbers = self._fitted(size)
        payload[: 2 * len(values)] = scales.view(-1).view(torch.uint8)
        negative = torch.lt(values, 0, out=torch.empty_like(values))  # straight to float32, which is ten times as fast
        if len(PLANES[self.spec.count]) == 2:
            digits = [negative, numbers]
        else:
            digits = [(2 * numbers + negative - self._zero).clamp_min_(0)]
        at = 2 * len(values)
        for (radix, per_byte), plane in zip(PLANES[self.spec.count], digits, strict=True):
            if pad := -self.spec.block % per_byte:
                plane = torch.nn.functional.pad(plane, (0, pad))
            packed = plane.view(-1, per_byte) @ torch.tensor([float(radix**each) for each in range(per_byte)])
            payload[at : at + len(packed)] = packed.to(torch.uint8)
            at += len(packed)
        if state:
            self._put(values - self._decoded(payload, len(values)), segments, state[0], False)

    def decode(self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context) -> None:
        self.check(payload, segments, dtype)
        count = sum(-(-row.numel // self.spec.block) for row in segments.rows)
        self._put(self._decoded(payload, count), segments, dst, add)

    def _decoded(self, payload: Tensor, count: int) -> Tensor:
        """The values of so many blocks."""
        block, at = self.spec.block, 2 * count
        values = payload[: 2 * count].clone().view(torch.bfloat16).float().view(-1, 1)
        for (_, per_byte), table in zip(PLANES[self.spec.count], self._tables, strict=True):
            size = -(-block // per_byte)
            plane = torch.nn.functional.embedding(payload[at : at + count * size].int(), table)
            values = values * plane.view(count, -1)[:, :block]
            at += count * size
        return values

    def _fitted(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """bfloat16 scales [blocks, 1], and the number of each magnitude, float32 [blocks, block]."""
        if self.spec.count == 3:
            scale = size.mean(1, keepdim=True).mul_(0.85 / self._edges[0])
        else:
            scale = size.square().mean(1, keepdim=True).sqrt_()
        above = torch.empty_like(size)
        for _ in range(self.spec.fits + (self.spec.count > 3)):
            fitted = torch.full_like(size, self._magnitudes[0])
            for edge, low, high in zip(self._edges, self._magnitudes, self._magnitudes[1:], strict=False):
                fitted.add_(torch.gt(size, scale * edge, out=above), alpha=high - low)
            scale = torch.linalg.vecdot(size, fitted).div_(torch.linalg.vecdot(fitted, fitted).clamp_min_(1e-30)).unsqueeze(1)
        rounded = scale.bfloat16()
        scale, numbers = rounded.float(), torch.zeros_like(size)
        for edge in self._edges:
            numbers.add_(torch.gt(size, scale * edge, out=above))
        return rounded, numbers

    def _in_blocks(self, flat: Tensor, segments: Segments) -> Tensor:
        """The elements of all segments, [blocks, block]; the last blocks of segments are padded with zeros."""
        parts = []
        for row in segments.rows:
            parts.append(flat[row.offset : row.offset + row.numel])
            if pad := -row.numel % self.spec.block:
                parts.append(flat.new_zeros(pad))
        return torch.cat(parts).view(-1, self.spec.block) if parts else flat.new_zeros(0, self.spec.block)

    def _put(self, blocks: Tensor, segments: Segments, dst: Tensor, add: bool) -> None:
        """Write or add what `_in_blocks` would have taken from `dst`."""
        flat, at = blocks.view(-1), 0
        for row in segments.rows:
            into, part = dst[row.offset : row.offset + row.numel], flat[at : at + row.numel]
            if add:
                into.add_(part)
            else:
                into.copy_(part)
            at += row.numel + -row.numel % self.spec.block


def _unpacked(values: Tensor, radix: int, per_byte: int) -> Tensor:
    """The values of the digits of every byte, of shape (256, per_byte)."""
    digits = torch.arange(256).unsqueeze(1) // torch.tensor([radix**each for each in range(per_byte)]) % radix
    return values[digits.clamp(max=len(values) - 1)]
