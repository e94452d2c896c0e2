"""Payloads of two bits an element that stand for three values: thresholds (MXNet's 2-bit quantisation), and TernGrad with
clipping.

Thresholds: t in bfloat16 for all blocks, zero bytes up to a multiple of 16, and the codes of all blocks in planes; with a
fixed threshold there are only the codes. Code 0 is zero, 1 is t, 2 is -t, 3 a NaN. A block whose sum of magnitudes is 2^126
or more, or a NaN, has a NaN for t and decodes to NaN throughout; with a fixed threshold an element that is not finite, or
2^126 or more, has code 3. In both cases the residual stays what it was.

TernGrad: the payload of QSGD with 2 bits and scale 'max', of values cut back to the scale.
"""

import torch
from torch import Tensor

from gradwire.core.payload import coded_bytes
from gradwire.kernels.reference.numbers import HUGE, TINY, bf16_up, bits_of, equal_blocks, narrow
from gradwire.kernels.reference.planes import pack, unpack
from gradwire.kernels.reference.qsgd import SHORT
from gradwire.kernels.reference.random import random_words, stream_key
from gradwire.kernels.reference.signs import block_sums
from gradwire.kernels.segments import Segments

SQUARE_LOW, SQUARE_HIGH = 2.0**-40, 2.0**50
"""A block whose largest magnitude lies between these has squares that float32 can add up; others are brought there."""
LARGEST_BF16 = 2.0**128 - 2.0**120


def threshold_encode(
    src: Tensor,
    residual: Tensor | None,
    segments: Segments,
    block: int,
    threshold: float,
    multiple: float,
    payload: Tensor,
) -> None:
    """Encode src (float32, bfloat16 or float16, flat). t is `threshold`, or where that is 0 so many times the block's mean
    magnitude.

    With a residual (float32, as long as src) src + residual is encoded, and the residual becomes what was lost.
    """
    scale_at, code_at = 0, _scale_bytes(segments, block, threshold)
    payload[:code_at] = 0
    for seg in segments.rows:
        for at, count, n in equal_blocks(seg.numel, block):
            where = slice(seg.offset + at, seg.offset + at + count * n)
            v = src[where].to(torch.float32)
            if residual is not None:
                v = v + residual[where]
            v = v.reshape(count, n)
            if threshold:
                t = torch.full((count, 1), threshold, dtype=torch.float32, device=v.device)
                finite = v.abs() < HUGE  # false for NaN too
            else:
                t, finite = _thresholds(v, multiple)
                payload[scale_at : scale_at + count * 2] = narrow(t, torch.bfloat16).reshape(-1).view(torch.uint8)
                scale_at += count * 2
            above, under = (v >= t) & (t > 0), (v <= -t) & (t > 0)
            codes = above.to(torch.int64) + 2 * under.to(torch.int64)
            packed = pack(torch.where(finite, codes, 3 if threshold else 0), 2)
            payload[code_at : code_at + packed.numel()] = packed.reshape(-1)
            code_at += packed.numel()
            if residual is not None:
                lost = torch.where(above, v - t, torch.where(under, v + t, v))
                residual[where] = torch.where(finite, lost, residual[where].reshape(count, n)).reshape(-1)


def threshold_decode(payload: Tensor, segments: Segments, block: int, threshold: float, add: bool, dst: Tensor) -> None:
    """Write what payload holds to dst (flat), or add it to dst."""
    scale_at, code_at = 0, _scale_bytes(segments, block, threshold)
    for seg in segments.rows:
        for at, count, n in equal_blocks(seg.numel, block):
            t = torch.full((count, 1), threshold, dtype=torch.float32, device=payload.device)
            if not threshold:
                t = payload[scale_at : scale_at + count * 2].clone().view(torch.bfloat16).to(torch.float32).unsqueeze(1)
                scale_at += count * 2
            size = count * ((n + 7) // 8) * 2
            codes = unpack(payload[code_at : code_at + size].reshape(count, -1), n, 2)
            code_at += size
            values = torch.cat([t - t, t, -t, torch.full_like(t, float("nan"))], dim=1)
            value = values.gather(1, codes).reshape(-1)
            where = slice(seg.offset + at, seg.offset + at + count * n)
            dst[where] = dst[where] + value if add else narrow(value, dst.dtype)


def terngrad_encode(
    src: Tensor, residual: Tensor | None, segments: Segments, stream: Tensor, block: int, clip: float, payload: Tensor
) -> None:
    """As `qsgd_encode` with 2 bits, scale 'max' and stochastic rounding, but a scale is at most `clip` times the root mean
    square of its block, and what is beyond counts as that. Decoded by `qsgd_decode`."""
    scale_at, code_at = 0, coded_bytes([(s.numel, 2) for s in segments.rows], block).scales
    payload[:code_at] = 0
    words = [int(word) for word in stream.tolist()]
    for seg in segments.rows:
        key = stream_key(words, seg.key)
        for at, count, n in equal_blocks(seg.numel, block):
            where = slice(seg.offset + at, seg.offset + at + count * n)
            v = src[where].to(torch.float32)
            if residual is not None:
                v = v + residual[where]
            v = v.reshape(count, n)
            finite = (v.abs() < HUGE).all(dim=1, keepdim=True)
            safe = torch.where(finite, v, 0.0)
            bound = _bounds(safe, clip)
            scale = narrow(torch.where(finite, bound, float("nan")), torch.bfloat16)
            payload[scale_at : scale_at + count * 2] = scale.reshape(-1).view(torch.uint8)
            scale_at += count * 2
            counter = (seg.first + at + torch.arange(count, device=v.device) * n) // 2
            codes = _ternary_codes(safe.clamp(-bound, bound), bound, counter, key)
            packed = pack(torch.where(finite, codes, 0), 2)
            payload[code_at : code_at + packed.numel()] = packed.reshape(-1)
            code_at += packed.numel()
            if residual is not None:
                lost = torch.where(finite, v - (codes - 1) * bound, residual[where].reshape(count, n))
                residual[where] = lost.reshape(-1)


def _scale_bytes(segments: Segments, block: int, threshold: float) -> int:
    return 0 if threshold else coded_bytes([(s.numel, 2) for s in segments.rows], block).scales


def _thresholds(v: Tensor, multiple: float) -> tuple[Tensor, Tensor]:
    """t of the rows of v, (rows, 1), a number of bfloat16 or NaN, and which rows are finite."""
    total = block_sums(v.abs()).unsqueeze(1)
    finite = total < HUGE  # false for NaN too
    t = narrow((total / v.shape[1] * multiple).to(torch.float32), torch.bfloat16).to(torch.float32)
    return torch.where(finite, t.clamp(max=LARGEST_BF16), float("nan")), finite


def _bounds(v: Tensor, clip: float) -> Tensor:
    """The scales of the rows of v, (rows, 1), numbers of bfloat16 in float32."""
    largest = v.abs().amax(dim=1, keepdim=True)
    exponent = bits_of(largest) >> 23
    power = (torch.where(exponent < 7, 247, 254 - exponent) << 23).to(torch.int32).view(torch.float32)
    by = torch.where((largest >= SQUARE_LOW) & (largest < SQUARE_HIGH), 1.0, power)
    total = block_sums((v * by) * (v * by)).unsqueeze(1)
    limit = (clip * (total / v.shape[1]).sqrt() / by.double()).to(torch.float32)
    bound = torch.minimum(limit, largest)
    raw = torch.where(bound >= TINY, bf16_up(bits_of(bound)), 0)
    return (raw << 16).to(torch.int32).view(torch.float32)


def _ternary_codes(v: Tensor, bound: Tensor, counter: Tensor, key: int) -> Tensor:
    """Codes (int64) of v; counter (blocks) numbers the first random word of each block."""
    n, half = v.shape[1], (v.shape[1] + 7) // 8 * 4
    factor = torch.tensor(65536.0 * SHORT, dtype=torch.float32, device=v.device)
    inverse = torch.where(bound >= TINY, factor / bound, 0.0)
    words = random_words(counter.unsqueeze(1) + torch.arange(half, device=v.device), key)
    u = torch.cat([words & 0xFFFF, words >> 16], dim=1)[:, :n]
    return ((v * inverse + 65536.0).to(torch.int64) + u) >> 16
