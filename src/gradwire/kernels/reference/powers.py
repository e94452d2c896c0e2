"""Powers of two with a sign: natural compression, and QSGD's exponential levels, which are powers of two times the scale.

A code has b bits. The first bit is the sign. The other bits are the number of the power, or 0 for zero.

    natural, e from 1 to 127                     value = 2^(E - 127 + e)        scale 2^E, the smallest not below the maximum
    exponential, i from 1 to L = 2^(b-1) - 1     value = scale * 2^(i - L)

Stochastic rounding chooses one of the two neighbouring levels so that the mean is right. Nearest rounding chooses the nearer
level, and the upper one of two equally near levels. Encoding adds 16 random bits to the mantissa; a carry gives the next power.
The level below the lowest one is zero. Levels that float32 does not hold as normal numbers (natural: below 2^-126; exponential:
below 2^-120) count as zero; values there become the smallest remaining level or zero. In natural compression with a scale above
1, a value more than 126 powers below the scale is zero, unless it is rounded up to the lowest level. A block counts as zero if
its scale is below 2^-100.
"""

from functools import partial

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import TINY, bf16_value, bits_of, float_of
from gradwire.kernels.reference.qsgd import UniformLevels, levels_encode
from gradwire.kernels.reference.scaled import Coder, scaled_decode, scaled_encode
from gradwire.kernels.segments import Segments, State


class _Natural(Coder):
    def scales(self, v: Tensor, bits: int) -> Tensor:
        bound = v.abs().amax(dim=1, keepdim=True)
        return torch.where(bound >= TINY, (bits_of(bound) + 0x7FFFFF) >> 23 << 7, 0)

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        exponent = raw >> 7
        power, lowest = (bits_of(v.abs()) + (u << 7)) >> 23, (exponent - 126).clamp(min=1)
        return _signed(torch.where(power >= lowest, power - (exponent - 127), 0), v, raw, bits)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        exponent = (raw >> 7) & 0xFF
        unit = torch.where(exponent == 0xFF, float("nan"), 1.0)
        return _value(codes, exponent - 127, unit, bits)


class _Exponential(UniformLevels):
    """Levels that halve from the scale on. Scales are those of uniform levels."""

    def __init__(self, scale: str) -> None:
        super().__init__(scale)
        self.ternary = False  # zero has two signs

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        levels = (1 << (bits - 1)) - 1
        size = (v.abs() * (1.0 / bf16_value(raw))).clamp(max=1.0)
        lowest = (134 - (raw >> 7)).clamp(min=128 - levels)
        floor = float_of(lowest << 23)
        below = size < floor  # there the mantissa of size + floor is size / floor
        rounded = (bits_of(torch.where(below, size + floor, size)) + (u << 7)) >> 23
        power = rounded - below.to(torch.int64)
        return _signed(torch.where(power >= lowest, power - (127 - levels), 0), v, raw, bits)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        return _value(codes, 128 - (1 << (bits - 1)), bf16_value(raw), bits)


def _signed(magnitude: Tensor, v: Tensor, raw: Tensor, bits: int) -> Tensor:
    """Codes with the sign of v; 0 in blocks with scale 0."""
    return (magnitude | (torch.signbit(v).to(torch.int64) << (bits - 1))) * (raw != 0)


def _value(codes: Tensor, offset: Tensor | int, unit: Tensor, bits: int) -> Tensor:
    magnitude = codes & ((1 << (bits - 1)) - 1)
    power = magnitude + offset
    size = float_of(torch.where((magnitude > 0) & (power > 0), power << 23, 0)) * unit
    return torch.where(codes >> (bits - 1) == 1, -size, size)


def natural_encode(src: Tensor, residual: State, segments: Segments, stream: Tensor, block: int, payload: Tensor) -> None:
    """Encode as `scaled_encode` does, in natural compression."""
    scaled_encode(_Natural(), src, residual, segments, stream, block, payload)


natural_decode = partial(scaled_decode, _Natural())
exponential_encode = partial(levels_encode, _Exponential)
"""Encodes as `qsgd_encode` does, with levels that halve from the scale ('max' or 'l2') on."""
exponential_decode = partial(scaled_decode, _Exponential("max"))
