"""QSGD payload: the scales of all blocks (bfloat16, rounded so that they still bound the block; two for 'minmax'), zero
bytes up to a multiple of 16, then the codes of all blocks. A block of n elements is padded to m, a multiple of 8, and its
b-bit codes are cut into planes of 4, 2 and 1 bits (7 = 4 + 2 + 1): a plane of width w takes m*w/8 bytes, byte j of it
holding codes j, j+S, j+2S, .. with S = m*w/8. A code is found in fixed point with 16 fractional bits:

    code = (int((x - base) * inverse + origin) + u) >> 16        u uniform in 0..65535; 32768 rounds to nearest
    value = base + (code - zero) * step

A block that holds a NaN, an Inf or a value of 2^126 or more has a NaN scale and decodes to NaN throughout: nothing
non-finite becomes finite.
"""

import torch
from torch import Tensor

from gradwire.core.payload import qsgd_bytes
from gradwire.kernels.reference.numbers import HUGE, TINY, bf16_towards, bf16_up, bits_of, equal_blocks, narrow
from gradwire.kernels.reference.planes import pack, unpack
from gradwire.kernels.reference.random import random_words, stream_key
from gradwire.kernels.segments import Segments

SHORT = 1.0 - 2.0**-22  # keeps the largest value from rounding past the largest code


def qsgd_encode(
    src: Tensor,
    residual: Tensor | None,
    segments: Segments,
    stream: Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: Tensor,
) -> None:
    """Encode src (float32, bfloat16 or float16, flat) into payload (uint8); stream is int64 (seed, step, encode, rank).

    With a residual (float32, as long as src) src + residual is encoded, and the residual becomes what was lost.
    """
    scale_bytes, _ = qsgd_bytes([(s.numel, s.bits) for s in segments.rows], block, scale)
    payload[:scale_bytes] = 0
    words, keyed = [int(word) for word in stream.tolist()], 2 if scale == "minmax" else 1
    scale_at, code_at = 0, scale_bytes
    for seg in segments.rows:
        key = stream_key(words, seg.key)
        for at, count, n in equal_blocks(seg.numel, block):
            where = slice(seg.offset + at, seg.offset + at + count * n)
            v = src[where].to(torch.float32)
            if residual is not None:
                v = v + residual[where]
            v = v.reshape(count, n)
            scales, finite = find_scale(v, scale)
            payload[scale_at : scale_at + scales.numel() * 2] = scales.reshape(-1).view(torch.uint8)
            scale_at += count * keyed * 2
            grid = _LevelGrid(scales, scale, seg.bits)
            counter = (seg.first + at + torch.arange(count, device=src.device) * n) // 2
            codes = _quantise(torch.where(finite, v, 0.0), grid, counter, key if rounding == "stochastic" else None)
            packed = pack(torch.where(finite, codes, 0), seg.bits)
            payload[code_at : code_at + packed.numel()] = packed.reshape(-1)
            code_at += packed.numel()
            if residual is not None:
                lost = torch.where(finite, v - grid.value(codes), residual[where].reshape(count, n))
                residual[where] = lost.reshape(-1)


def qsgd_decode(payload: Tensor, segments: Segments, block: int, scale: str, add: bool, dst: Tensor) -> None:
    """Write what payload holds to dst (flat), or add it to dst."""
    scale_bytes, _ = qsgd_bytes([(s.numel, s.bits) for s in segments.rows], block, scale)
    keyed = 2 if scale == "minmax" else 1
    scale_at, code_at = 0, scale_bytes
    for seg in segments.rows:
        for at, count, n in equal_blocks(seg.numel, block):
            raw = payload[scale_at : scale_at + count * keyed * 2].clone()
            scale_at += count * keyed * 2
            grid = _LevelGrid(raw.view(torch.int16).reshape(count, keyed), scale, seg.bits)
            size = count * ((n + 7) // 8) * seg.bits
            codes = unpack(payload[code_at : code_at + size].reshape(count, -1), n, seg.bits)
            code_at += size
            where = slice(seg.offset + at, seg.offset + at + count * n)
            value = grid.value(codes).reshape(-1)
            dst[where] = dst[where] + value if add else narrow(value, dst.dtype)


def find_scale(v: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """Raw bfloat16 scales of the rows of v as int16 of shape (rows, 1 or 2), and which rows are finite, (rows, 1)."""
    finite = (v.abs() < HUGE).all(dim=1, keepdim=True)  # false for NaN too
    safe = torch.where(finite, v, 0.0)
    if scale == "minmax":
        low, high = safe.amin(dim=1), safe.amax(dim=1)
        # the minimum and maximum as bit patterns: -0.0 is below 0.0
        low = torch.where((low == 0) & ((safe == 0) & torch.signbit(safe)).any(dim=1), -0.0, low)
        high = torch.where((high == 0) & ((safe == 0) & ~torch.signbit(safe)).any(dim=1), 0.0, high)
        raw = torch.stack([bf16_towards(low, up=False), bf16_towards(high, up=True)], dim=1)
    else:
        if scale == "max":
            bound = safe.abs().amax(dim=1)
        else:
            lanes = torch.nn.functional.pad(safe.double() ** 2, (0, -v.shape[1] % 16)).reshape(v.shape[0], -1, 16)
            total = torch.zeros_like(lanes[:, 0])
            for row in range(lanes.shape[1]):
                total = total + lanes[:, row]
            for width in (8, 4, 2, 1):
                total = total[:, :width] + total[:, width : 2 * width]
            bound = total.sqrt().clamp(max=2.0**128 - 2.0**120).to(torch.float32)[:, 0]
        raw = torch.where(bound >= TINY, bf16_up(bits_of(bound)), 0).unsqueeze(1)
    raw = torch.where(finite, raw, 0x7FC0)
    return torch.where(raw >= 0x8000, raw - 0x10000, raw).to(torch.int16), finite


class _LevelGrid:
    """How a block's values map to codes; tensors of shape (blocks, 1)."""

    def __init__(self, raw: Tensor, scale: str, bits: int) -> None:
        value = ((raw.to(torch.int32) & 0xFFFF) << 16).view(torch.float32)
        if scale == "minmax":
            top = float((1 << bits) - 1)
            self.base, span = value[:, :1], value[:, 1:] - value[:, :1]
            self.origin, self.zero = 0.0, 0
        else:
            top = float((1 << (bits - 1)) - 1)
            self.base, span = torch.zeros_like(value), value
            self.origin, self.zero = top * 65536.0, int(top)
        factor = torch.tensor(top * (65536.0 * SHORT), dtype=torch.float32)
        self.inverse = torch.where(span >= TINY, factor.to(span.device) / span, 0.0)
        self.step = span / top

    def value(self, codes: Tensor) -> Tensor:
        return (codes - self.zero).to(torch.float32) * self.step + self.base


def _quantise(v: Tensor, grid: _LevelGrid, counter: Tensor, key: int | None) -> Tensor:
    """Codes (int64) of v; counter (blocks) numbers the first random word of each block; no key rounds to nearest."""
    n, half = v.shape[1], (v.shape[1] + 7) // 8 * 4
    fixed = ((v - grid.base) * grid.inverse + grid.origin).nan_to_num(0.0).to(torch.int32).to(torch.int64)
    if key is None:
        return (fixed + 0x8000) >> 16
    words = random_words(counter.unsqueeze(1) + torch.arange(half, device=v.device), key)
    u = torch.cat([words & 0xFFFF, words >> 16], dim=1)[:, :n]
    return (fixed + u) >> 16
