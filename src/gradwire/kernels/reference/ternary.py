"""Codes of two bits that stand for three values: thresholds (MXNet's 2-bit quantisation), and TernGrad with clipping.

Thresholds: the scale of a block is its threshold t. Code 0 is zero, 1 is t, 2 is -t, 3 a NaN. A block is finite if its sum of
magnitudes is below 2^126. A fixed threshold is not sent: the payload has only codes. An element that is not finite, or 2^126 or
more, then has code 3 and keeps its residual, and the rest of its block is encoded as usual.

TernGrad: the payload of QSGD with 2 bits and scale 'max', of values cut back to the scale.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import HUGE, TINY, bf16_up, bf16_value, bits_of, float_of, narrow
from gradwire.kernels.reference.qsgd import UniformLevels
from gradwire.kernels.reference.scaled import Coder, scaled_decode, scaled_encode
from gradwire.kernels.reference.signs import block_sums
from gradwire.kernels.segments import Segments, State

SQUARE_LOW, SQUARE_HIGH = 2.0**-40, 2.0**50
"""Range of a block's largest magnitude in which float32 can add up the squares. Other blocks are scaled into this range."""
LARGEST_BF16 = 2.0**128 - 2.0**120


class _ThresholdCoder(Coder):
    width = 2

    def __init__(self, threshold: float, multiple: float) -> None:
        self.threshold, self.multiple = threshold, multiple
        self.per_block, self.missing = (0, 3) if threshold else (1, 0)

    def finite(self, v: Tensor, bits: int) -> Tensor:
        return v.abs() < HUGE if self.threshold else block_sums(v.abs()).unsqueeze(1) < HUGE  # false for NaN too

    def scales(self, v: Tensor, bits: int) -> Tensor:
        if self.threshold:
            return torch.zeros(v.shape[0], 0, dtype=torch.int64, device=v.device)
        mean = (block_sums(v.abs()).unsqueeze(1) / v.shape[1] * self.multiple).to(torch.float32)
        return bits_of(narrow(mean, torch.bfloat16).to(torch.float32).clamp(max=LARGEST_BF16)) >> 16

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        t = self._thresholds(raw)
        above, under = (v >= t) & (t > 0), (v <= -t) & (t > 0)
        return above.to(torch.int64) + 2 * under.to(torch.int64)

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        t = self._thresholds(raw)
        return torch.cat([t - t, t, -t, torch.full_like(t, float("nan"))], dim=1).gather(1, codes)

    def _thresholds(self, raw: Tensor) -> Tensor:
        fixed = torch.full((raw.shape[0], 1), self.threshold, dtype=torch.float32, device=raw.device)
        return fixed if self.threshold else bf16_value(raw)


class _Clipped(UniformLevels):
    width = 2

    def __init__(self, clip: float) -> None:
        super().__init__("max")
        self.clip = clip

    def scales(self, v: Tensor, bits: int) -> Tensor:
        largest = v.abs().amax(dim=1, keepdim=True)
        exponent = bits_of(largest) >> 23
        power = float_of(torch.where(exponent < 7, 247, 254 - exponent) << 23)
        by = torch.where((largest >= SQUARE_LOW) & (largest < SQUARE_HIGH), 1.0, power)
        total = block_sums((v * by) * (v * by)).unsqueeze(1)
        limit = (self.clip * (total / v.shape[1]).sqrt() / by.double()).to(torch.float32)
        bound = torch.minimum(limit, largest)
        return torch.where(bound >= TINY, bf16_up(bits_of(bound)), 0)

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        bound = bf16_value(raw)
        return super().codes(v.clamp(-bound, bound), raw, bits, u)


def threshold_encode(
    src: Tensor, residual: State, segments: Segments, block: int, threshold: float, multiple: float, payload: Tensor
) -> None:
    """Encode as `scaled_encode` does. t is `threshold`, or, if `threshold` is 0, `multiple` times the block's mean magnitude."""
    scaled_encode(_ThresholdCoder(threshold, multiple), src, residual, segments, None, block, payload)


def threshold_decode(payload: Tensor, segments: Segments, block: int, threshold: float, add: bool, dst: Tensor) -> None:
    """Decode as `scaled_decode` does; threshold: the threshold of `threshold_encode`."""
    scaled_decode(_ThresholdCoder(threshold, 1.0), payload, segments, block, add, dst)


def terngrad_encode(
    src: Tensor, residual: State, segments: Segments, stream: Tensor, block: int, clip: float, payload: Tensor
) -> None:
    """Encode as `qsgd_encode` does with 2 bits, scale 'max' and stochastic rounding, but with a scale of at most `clip` times the
    block's root mean square. Values beyond the scale count as the scale. `qsgd_decode` decodes the payload."""
    scaled_encode(_Clipped(clip), src, residual, segments, stream, block, payload)
