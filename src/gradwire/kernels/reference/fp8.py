"""FP8: a block is scaled so that its largest magnitude becomes the format's largest number, and is rounded to nearest even.

    code = value * (largest of the format / scale) in the format, saturating          scale: the block's maximum, rounded up
    value = code * (scale / largest of the format)

A block counts as zero if its largest magnitude is below 2^-110, because the factor would overflow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import bf16_up, bf16_value, bits_of
from gradwire.kernels.reference.scaled import Coder, scaled_decode, scaled_encode
from gradwire.kernels.segments import Segments, State

TINY = 2.0**-110


@dataclass(frozen=True)
class _Format(Coder):
    dtype: torch.dtype
    mantissa: int
    """Bits of the mantissa."""
    bias: int
    largest: float

    def scales(self, v: Tensor, bits: int) -> Tensor:
        bound = v.abs().amax(dim=1, keepdim=True)
        return torch.where(bound >= TINY, bf16_up(bits_of(bound)), 0)

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        x = v * (torch.tensor(self.largest, dtype=torch.float32) / bf16_value(raw))
        rounded = x.clamp(-self.largest, self.largest).to(self.dtype)
        return rounded.view(torch.uint8).to(torch.int64) * (raw != 0)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        exponent, places = (codes & 0x7F) >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        places = torch.where(exponent > 0, places + (1 << self.mantissa), places).to(torch.float32)
        magnitude = torch.ldexp(places, exponent.clamp(min=1) - self.bias - self.mantissa)
        return torch.where(codes > 0x7F, -magnitude, magnitude) * (bf16_value(raw) / self.largest)


_FORMATS = {"e4m3": _Format(torch.float8_e4m3fn, 3, 7, 448.0), "e5m2": _Format(torch.float8_e5m2, 2, 15, 57344.0)}


def fp8_encode(src: Tensor, residual: State, segments: Segments, block: int, format: str, payload: Tensor) -> None:
    """Encode as `scaled_encode` does; format is e4m3 or e5m2."""
    scaled_encode(_FORMATS[format], src, residual, segments, None, block, payload)


def fp8_decode(payload: Tensor, segments: Segments, block: int, format: str, add: bool, dst: Tensor) -> None:
    """Decode as `scaled_decode` does; format is e4m3 or e5m2."""
    scaled_decode(_FORMATS[format], payload, segments, block, add, dst)
