"""Payloads of blocks with one bfloat16 scale each: FP8, natural compression, QSGD's exponential levels.

As with QSGD: the scales of all blocks, zero bytes up to a multiple of 16, then the codes of all blocks, each padded to a
multiple of 8 elements. A block that holds a NaN, an Inf or a value of 2^126 or more has a NaN scale and decodes to NaN
throughout, and its residual stays what it was. A block with scale 0 is one of zeros: its codes are 0, and a residual
takes all of it.
"""

from typing import Protocol

import torch
from torch import Tensor

from gradwire.core.payload import coded_bytes
from gradwire.kernels.reference.numbers import HUGE, equal_blocks, narrow
from gradwire.kernels.reference.planes import pack, unpack
from gradwire.kernels.reference.random import random_words, stream_key
from gradwire.kernels.segments import Segment, Segments

BAD = 0x7FC0


class Coder(Protocol):
    """How the blocks of one segment are coded; the first dimension of all tensors are blocks."""

    def bits(self, segment: Segment) -> int:
        """Bits of a code."""

    def scales(self, v: Tensor) -> Tensor:
        """Raw bfloat16 scales of finite v of shape (blocks, n), int64 of shape (blocks, 1); 0 for a block of zeros."""

    def codes(self, v: Tensor, raw: Tensor, bits: int, random: Tensor) -> Tensor:
        """Codes of v, int64; random has 16 bits for each element."""

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        """What codes stand for, float32; NaN where the scale is."""


def scaled_encode(
    coder: Coder, src: Tensor, residual: Tensor | None, segments: Segments, stream: Tensor, block: int, payload: Tensor
) -> None:
    """Encode src (+ residual) into payload; the residual becomes what was lost."""
    code_at, _ = coded_bytes([(s.numel, coder.bits(s)) for s in segments.rows], block)
    scale_at, words = 0, [int(word) for word in stream.tolist()]
    payload[:code_at] = 0
    for seg in segments.rows:
        key, bits = stream_key(words, seg.key), coder.bits(seg)
        for at, count, n in equal_blocks(seg.numel, block):
            where = slice(seg.offset + at, seg.offset + at + count * n)
            before = (
                torch.zeros(count, n, dtype=torch.float32, device=src.device)
                if residual is None
                else residual[where].reshape(count, n)
            )
            v = src[where].to(torch.float32).reshape(count, n)
            v = v if residual is None else v + before
            finite = (v.abs() < HUGE).all(dim=1, keepdim=True)  # false for NaN too
            safe = torch.where(finite, v, 0.0)
            raw = torch.where(finite, coder.scales(safe), BAD)
            payload[scale_at : scale_at + 2 * count] = raw.to(torch.int16).reshape(-1).view(torch.uint8)
            scale_at += 2 * count
            first = (seg.first + at + torch.arange(count, device=src.device) * n) // 2
            sends = finite & (raw != 0)
            codes = torch.where(sends, coder.codes(safe, raw, bits, random_halves(first, n, key)), 0)
            packed = pack(codes, bits)
            payload[code_at : code_at + packed.numel()] = packed.reshape(-1)
            code_at += packed.numel()
            if residual is not None:
                sent = torch.where(sends, coder.values(codes, raw, bits), 0.0)
                residual[where] = torch.where(finite, v - sent, before).reshape(-1)


def scaled_decode(coder: Coder, payload: Tensor, segments: Segments, block: int, add: bool, dst: Tensor) -> None:
    """Write what payload holds to dst (flat), or add it to dst."""
    code_at, _ = coded_bytes([(s.numel, coder.bits(s)) for s in segments.rows], block)
    scale_at = 0
    for seg in segments.rows:
        bits = coder.bits(seg)
        for at, count, n in equal_blocks(seg.numel, block):
            raw = payload[scale_at : scale_at + 2 * count].clone().view(torch.int16).to(torch.int64) & 0xFFFF
            scale_at += 2 * count
            size = count * ((n + 7) // 8) * bits
            codes = unpack(payload[code_at : code_at + size].reshape(count, -1), n, bits)
            code_at += size
            where = slice(seg.offset + at, seg.offset + at + count * n)
            value = coder.values(codes, raw.unsqueeze(1), bits).reshape(-1)
            dst[where] = dst[where] + value if add else narrow(value, dst.dtype)


def random_halves(first: Tensor, n: int, key: int) -> Tensor:
    """16 random bits for each of n elements of blocks whose first random word has the number `first` (blocks)."""
    half = (n + 7) // 8 * 4
    words = random_words(first.unsqueeze(1) + torch.arange(half, device=first.device), key)
    return torch.cat([words & 0xFFFF, words >> 16], dim=1)[:, :n]
