"""Powers of two with a sign: natural compression, and QSGD's exponential levels, which are powers of two times the scale.

The last b - 1 bits of a code of b bits say which power, 0 for zero; its first bit is the sign.

    natural, e from 1 to 127                     value = 2^(E - 127 + e)        scale 2^E, the smallest not below the maximum
    exponential, i from 1 to L = 2^(b-1) - 1     value = scale * 2^(i - L)

A value becomes one of the two neighbouring levels at random so that the mean is right, or the nearer one, the upper of
two that are as near. The random 16 bits are added to the mantissa, and a carry out of it is the next power. Below the
lowest level there is zero. Levels that float32 does not hold as normal numbers (natural: below 2^-126; exponential: below
2^-120) count as zero: what lies there goes to the smallest level that is left or to zero. Of natural compression what lies
more than 126 powers below the scale, where that exceeds 1, is zero unless it is rounded up to the lowest level. A block
whose scale is below 2^-100 counts as zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import TINY, bits_of
from gradwire.kernels.reference.qsgd import find_scale
from gradwire.kernels.reference.scaled import scaled_decode, scaled_encode
from gradwire.kernels.segments import Segment, Segments


class _Natural:
    def bits(self, segment: Segment) -> int:
        return 8

    def scales(self, v: Tensor) -> Tensor:
        bound = v.abs().amax(dim=1, keepdim=True)
        return torch.where(bound >= TINY, (bits_of(bound) + 0x7FFFFF) >> 23 << 7, 0)

    def codes(self, v: Tensor, raw: Tensor, bits: int, random: Tensor) -> Tensor:
        exponent = raw >> 7
        power, lowest = (bits_of(v.abs()) + (random << 7)) >> 23, (exponent - 126).clamp(min=1)
        return _signed(torch.where(power >= lowest, power - (exponent - 127), 0), v, bits)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        exponent = (raw >> 7) & 0xFF
        unit = torch.where(exponent == 0xFF, float("nan"), 1.0)
        return _value(codes, exponent - 127, unit, bits)


@dataclass(frozen=True)
class _Exponential:
    scale: str
    rounding: str

    def bits(self, segment: Segment) -> int:
        return segment.bits

    def scales(self, v: Tensor) -> Tensor:
        return find_scale(v, self.scale)[0].to(torch.int64)

    def codes(self, v: Tensor, raw: Tensor, bits: int, random: Tensor) -> Tensor:
        levels, scale = (1 << (bits - 1)) - 1, _float(raw << 16)
        size = (v.abs() * (1.0 / scale)).clamp(max=1.0)
        lowest = (134 - (raw >> 7)).clamp(min=128 - levels)
        u = random if self.rounding == "stochastic" else torch.full_like(random, 0x8000)
        power = _power(size, lowest, u)
        return _signed(torch.where(power >= lowest, power - (127 - levels), 0), v, bits)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        return _value(codes, 128 - (1 << (bits - 1)), _float(raw << 16), bits)


def _power(size: Tensor, lowest: Tensor, u: Tensor) -> Tensor:
    """The biased exponents to which sizes are rounded, lowest - 1 for zero."""
    floor = _float(lowest << 23)
    below = size < floor  # there the mantissa of size + floor is size / floor
    rounded = (bits_of(torch.where(below, size + floor, size)) + (u << 7)) >> 23
    return rounded - below.to(torch.int64)


def _signed(magnitude: Tensor, v: Tensor, bits: int) -> Tensor:
    return magnitude | (torch.signbit(v).to(torch.int64) << (bits - 1))


def _value(codes: Tensor, offset: Tensor | int, unit: Tensor, bits: int) -> Tensor:
    magnitude = codes & ((1 << (bits - 1)) - 1)
    power = magnitude + offset
    size = _float(torch.where((magnitude > 0) & (power > 0), power << 23, 0)) * unit
    return torch.where(codes >> (bits - 1) == 1, -size, size)


def _float(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def natural_encode(
    src: Tensor, residual: Tensor | None, segments: Segments, stream: Tensor, block: int, payload: Tensor
) -> None:
    """Encode src (float32, bfloat16 or float16, flat) into payload; stream is int64 (seed, step, encode, rank).

    With a residual (float32, as long as src) src + residual is encoded, and the residual becomes what was lost.
    """
    scaled_encode(_Natural(), src, residual, segments, stream, block, payload)


def natural_decode(payload: Tensor, segments: Segments, block: int, add: bool, dst: Tensor) -> None:
    """Write what payload holds to dst (flat), or add it to dst."""
    scaled_decode(_Natural(), payload, segments, block, add, dst)


def exponential_encode(
    src: Tensor,
    residual: Tensor | None,
    segments: Segments,
    stream: Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: Tensor,
) -> None:
    """As `qsgd_encode`, with levels that halve from the scale ('max' or 'l2') on."""
    scaled_encode(_Exponential(scale, rounding), src, residual, segments, stream, block, payload)


def exponential_decode(payload: Tensor, segments: Segments, block: int, add: bool, dst: Tensor) -> None:
    """As `qsgd_decode`."""
    scaled_decode(_Exponential("max", "nearest"), payload, segments, block, add, dst)
