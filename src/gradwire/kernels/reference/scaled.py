"""Payloads of blocks: QSGD, TernGrad, thresholds, FP8, natural compression.

A payload holds the bfloat16 scales of all blocks, zero bytes up to a multiple of 16, then the codes of all blocks. A block of n
elements is padded to m, a multiple of 8, and its b-bit codes are cut into planes of 4, 2 and 1 bits (7 = 4 + 2 + 1): a plane of
width w takes m*w/8 bytes, and byte j of the plane holds codes j, j+S, j+2S, .. with S = m*w/8.

Codes of 2 bits that stand for three values (0, 1 and 2) are packed in base 3 in whole blocks of 64, 128, 192.. elements: 8 codes
take 13 bits. With S = m/8 byte j has codes j, j+S, .. j+4S as digits, the first one lowest. The digits j+5S, j+6S and j+7S are a
code of 5 bits. These S codes follow in planes.

A block that holds a NaN, an Inf or a value of 2^126 or more has a NaN scale. Such a block decodes to NaN throughout, and its
residual does not change, so that nothing non-finite becomes finite.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.core import code_bytes, coded_bytes, in_base_3
from gradwire.kernels.reference.numbers import HUGE, equal_blocks, given, narrow, pack, pack_base_3, unpack, unpack_base_3
from gradwire.kernels.reference.random import random_words, stream_key
from gradwire.kernels.reference.weights import values_of
from gradwire.kernels.segments import Segment, Segments, State

BAD = 0x7FC0
"""The bfloat16 that is NaN."""


class Coder:
    """The code of blocks. The first dimension of all tensors is blocks."""

    per_block = 1
    """Scales of a block."""
    missing = 0
    """The code of an element that is not finite."""
    width = 8
    """Bits of a code; 0: the segment's bits."""
    ternary = False
    """Whether codes of 2 bits stand for three values."""
    weights: Tensor | None = None
    """The stored weights of the elements (uint8, flat). None: all are 1."""

    def weight_of(self, where: slice, shape: tuple[int, int]) -> Tensor | float:
        """The weights of these elements."""
        return 1.0 if self.weights is None else values_of(self.weights[where]).reshape(shape)

    def bits(self, segment: Segment) -> int:
        return self.width or segment.bits

    def finite(self, v: Tensor, bits: int) -> Tensor:
        """Mask of the finite blocks of v, of shape (blocks, 1), or of the finite elements."""
        return (v.abs() < HUGE).all(dim=1, keepdim=True)  # false for NaN too

    def scales(self, v: Tensor, bits: int) -> Tensor:
        """Bits of the bfloat16 scales of finite v of shape (blocks, n), int64 of shape (blocks, per_block)."""
        raise NotImplementedError

    def codes(self, v: Tensor, raw: Tensor, bits: int, u: Tensor) -> Tensor:
        """Codes of v, int64. u: for each element 16 random bits, or the constant that rounds to nearest."""
        raise NotImplementedError

    def values(self, codes: Tensor, raw: Tensor, bits: int) -> Tensor:
        """The values of codes, float32; NaN in blocks with a NaN scale."""
        raise NotImplementedError


def scaled_encode(
    coder: Coder, src: Tensor, residual: State, segments: Segments, stream: Tensor | None, block: int, payload: Tensor
) -> None:
    """Encode src (float32, bfloat16 or float16, flat) into payload (uint8). stream is int64 (seed, step, encode, rank), or None
    for codes that are not random.

    With a residual (float32, as long as src) src + residual is encoded, and the residual becomes the error. Each element is
    divided by its weight before, and its error is multiplied by the weight.
    """
    coded = [(s.numel, coder.bits(s)) for s in segments.rows]
    scale_bytes = coded_bytes(coded, block, coder.per_block).scales
    payload[:scale_bytes] = 0
    for seg, at, where, scales, codes_at in _runs(coder, segments, block, payload, src.device):
        count, n = at.numel(), (where.stop - where.start) // at.numel()
        v = given(src, residual, where).reshape(count, n)
        weight = coder.weight_of(where, (count, n))
        v = v / weight
        bits = coder.bits(seg)
        finite = coder.finite(v, bits)
        safe = torch.where(finite, v, 0.0)
        raw = coder.scales(safe, bits)
        if coder.per_block:
            raw = torch.where(finite, raw, BAD)
            scales.copy_(raw.to(torch.int16).reshape(-1).view(torch.uint8))
        u = torch.full_like(safe, 0x8000, dtype=torch.int64)
        if stream is not None:
            u = _random_halves((seg.first + at) // 2, n, stream_key([*stream.tolist(), seg.key]))
        codes = torch.where(finite, coder.codes(safe, raw, bits, u), coder.missing)
        packed = pack_base_3(codes) if in_base_3(n, block, bits, coder.ternary) else pack(codes, bits)
        codes_at.copy_(packed.reshape(-1))
        if residual is not None:
            lost = (v - coder.values(codes, raw, bits)) * weight
            residual[where] = torch.where(finite, lost, residual[where].reshape(count, n)).reshape(-1)


def scaled_decode(coder: Coder, payload: Tensor, segments: Segments, block: int, add: bool, dst: Tensor) -> None:
    """Write the values of payload to dst (flat), times their weights, or add them to dst."""
    for seg, at, where, scales, codes_at in _runs(coder, segments, block, payload, dst.device):
        count, n = at.numel(), (where.stop - where.start) // at.numel()
        raw = scales.clone().view(torch.int16).to(torch.int64).reshape(count, coder.per_block) & 0xFFFF
        packed, bits = codes_at.reshape(count, -1), coder.bits(seg)
        codes = unpack_base_3(packed, n) if in_base_3(n, block, bits, coder.ternary) else unpack(packed, n, bits)
        value = (coder.values(codes, raw, bits) * coder.weight_of(where, (count, n))).reshape(-1)
        dst[where] = dst[where] + value if add else narrow(value, dst.dtype)


def _runs(
    coder: Coder, segments: Segments, block: int, payload: Tensor, device: torch.device
) -> Iterator[tuple[Segment, Tensor, slice, Tensor, Tensor]]:
    """Runs of equal blocks: the segment, the first element of each block in the segment, the run's place in the flat buffer, and
    the payload's bytes with the scales and codes of the run."""
    scale_at = 0
    code_at = coded_bytes([(s.numel, coder.bits(s)) for s in segments.rows], block, coder.per_block).scales
    for seg in segments.rows:
        for start, count, n in equal_blocks(seg.numel, block):
            scale_end = scale_at + 2 * coder.per_block * count
            code_end = code_at + count * code_bytes(n, block, coder.bits(seg), coder.ternary)
            where = slice(seg.offset + start, seg.offset + start + count * n)
            at = start + n * torch.arange(count, device=device)
            yield seg, at, where, payload[scale_at:scale_end], payload[code_at:code_end]
            scale_at, code_at = scale_end, code_end


def _random_halves(first: Tensor, n: int, key: int) -> Tensor:
    """Random numbers of 16 bits for n elements of each block. first: counters of the blocks' first random words, (blocks)."""
    half = (n + 7) // 8 * 4
    words = random_words(first.unsqueeze(1) + torch.arange(half, device=first.device), key)
    return torch.cat([words & 0xFFFF, words >> 16], dim=1)[:, :n]
