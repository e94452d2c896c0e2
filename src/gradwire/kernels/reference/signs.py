"""Payloads of one bit an element. A run is cut from its start into units of 512 elements. A unit of n elements is padded to m, a
multiple of 8, and its byte j holds elements j + k*m/8 in bit k. The bit is the sign bit. In payloads without means, which are
votes, -0.0 counts as 0.0, and zero counts as positive.

With means, the payload begins with the means of all blocks in bfloat16, rounded to nearest even, and zero bytes up to a multiple
of 16. One mean is the mean magnitude: elements decode to plus or minus the mean. Two means are the mean of the elements of at
least zero and the mean of the elements below zero (0 if there are none). A block size of 0 makes a whole run one block.

If a block's sum of magnitudes is 2^126 or more, or NaN, its means are NaN and its bits 0. The block decodes to NaN, and its
residual does not change. Payloads without means cannot express this, and send the sign bits.
"""

import torch
from torch import Tensor

from gradwire.core import SIGN_UNIT, coded_bytes
from gradwire.kernels.reference.numbers import HUGE, equal_blocks, given, narrow, pack, unpack
from gradwire.kernels.segments import Segments, State

PIECE = 8192
"""Elements that are summed as float32; the sums of pieces are added up as float64."""
LANES = 64


def sign_encode(src: Tensor, momentum: State, keep: float, segments: Segments, payload: Tensor) -> None:
    """Encode the signs of src (float32, bfloat16 or float16, flat).

    A momentum (float32, as long as src) becomes keep * momentum + (1 - keep) * src, and the signs of the momentum are encoded. An
    element of the momentum that would not be finite does not change, and the sign of src is encoded.
    """
    at = 0
    for seg in segments.rows:
        where = slice(seg.offset, seg.offset + seg.numel)
        below = _below_zero(src[where])
        if momentum is not None:
            mean = momentum[where] * keep + src[where].to(torch.float32) * (1.0 - keep)
            finite = mean.isfinite()
            momentum[where] = torch.where(finite, mean, momentum[where])
            below = torch.where(finite, _below_zero(mean), below)
        packed = _pack_units(below)
        payload[at : at + packed.numel()] = packed
        at += packed.numel()


def mean_sign_encode(src: Tensor, residual: State, segments: Segments, block: int, means: int, payload: Tensor) -> None:
    """Encode src (float32, bfloat16 or float16, flat) as signs with 1 or 2 means a block.

    With a residual (float32, as long as src) src + residual is encoded, and the residual becomes the error.
    """
    scale_at, code_at = 0, coded_bytes([(s.numel, 1) for s in segments.rows], block, means).scales
    payload[:code_at] = 0
    for seg in segments.rows:
        below = torch.zeros(seg.numel, dtype=torch.bool, device=src.device)
        for at, count, n in equal_blocks(seg.numel, block or max(seg.numel, 1)):
            run, where = slice(at, at + count * n), slice(seg.offset + at, seg.offset + at + count * n)
            v = given(src, residual, where).reshape(count, n)
            negative = torch.signbit(v)
            raw, finite = _means(v, negative, means)
            payload[scale_at : scale_at + raw.numel() * 2] = raw.reshape(-1).view(torch.uint8)
            scale_at += raw.numel() * 2
            below[run] = (negative & finite).reshape(-1)
            if residual is not None:
                lost = v - _values(raw, negative)
                residual[where] = torch.where(finite, lost, residual[where].reshape(count, n)).reshape(-1)
        packed = _pack_units(below)
        payload[code_at : code_at + packed.numel()] = packed
        code_at += packed.numel()


def sign_decode(payload: Tensor, segments: Segments, block: int, means: int, add: bool, dst: Tensor) -> None:
    """Write the values of payload to dst (flat), or add them to dst. Without means the values are -1 and 1."""
    scale_at, code_at = 0, coded_bytes([(s.numel, 1) for s in segments.rows], block, means).scales
    for seg in segments.rows:
        size = (seg.numel + 7) // 8
        below = _unpack_units(payload[code_at : code_at + size], seg.numel)
        code_at += size
        for at, count, n in equal_blocks(seg.numel, block or max(seg.numel, 1)):
            negative = below[at : at + count * n].reshape(count, n)
            raw = payload[scale_at : scale_at + count * means * 2].clone().view(torch.bfloat16).reshape(count, means)
            scale_at += count * means * 2
            value = _values(raw, negative).reshape(-1)
            where = slice(seg.offset + at, seg.offset + at + count * n)
            dst[where] = dst[where] + value if add else narrow(value, dst.dtype)


def block_sums(v: Tensor) -> Tensor:
    """The sums of the rows of v as float64: element i of a piece of 8192 is added to lane i % 64, lanes are folded in
    halves, both in float32, and the sums of pieces are added up."""
    width = PIECE if v.shape[1] > PIECE else -(-v.shape[1] // LANES) * LANES
    pieces = torch.nn.functional.pad(v, (0, -v.shape[1] % width)).reshape(v.shape[0], -1, width // LANES, LANES)
    lanes = torch.zeros_like(pieces[:, :, 0])
    for row in range(width // LANES):
        lanes = lanes + pieces[:, :, row]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    total = torch.zeros(v.shape[0], dtype=torch.float64, device=v.device)
    for piece in lanes[:, :, 0].double().unbind(1):
        total = total + piece
    return total


def _below_zero(v: Tensor) -> Tensor:
    return torch.signbit(v) & (v != 0)


def _means(v: Tensor, negative: Tensor, means: int) -> tuple[Tensor, Tensor]:
    """The means of the rows of v as bfloat16 of shape (rows, means), and the mask of finite rows, (rows, 1)."""
    if means == 1:
        above, under = block_sums(v.abs()), torch.zeros(v.shape[0], dtype=torch.float64, device=v.device)
        mean = (above / v.shape[1]).unsqueeze(1)
    else:
        above, under = block_sums(torch.where(v < 0, 0.0, v)), block_sums(torch.where(v < 0, v, 0.0))
        below = negative.sum(dim=1)
        mean = torch.stack([above / (v.shape[1] - below).clamp(min=1), under / below.clamp(min=1)], dim=1)
    finite = ((above < HUGE) & (-under < HUGE)).unsqueeze(1)  # false for NaN too
    return narrow(torch.where(finite, mean, float("nan")).to(torch.float32), torch.bfloat16), finite


def _values(means: Tensor, negative: Tensor) -> Tensor:
    value = means.to(torch.float32)
    if means.shape[1] == 0:
        value = torch.ones(len(means), 1, dtype=torch.float32, device=means.device)
    return torch.where(negative, value[:, 1:] if means.shape[1] == 2 else -value, value[:, :1])


def _pack_units(below: Tensor) -> Tensor:
    """Pack the sign bits of one run."""
    runs = equal_blocks(below.numel(), SIGN_UNIT)
    codes = [below[at : at + count * n].reshape(count, n).to(torch.int64) for at, count, n in runs]
    packed = [pack(part, 1).reshape(-1) for part in codes]
    return torch.cat([below.new_zeros(0, dtype=torch.uint8), *packed])


def _unpack_units(packed: Tensor, numel: int) -> Tensor:
    below, size = torch.zeros(numel, dtype=torch.bool, device=packed.device), SIGN_UNIT // 8
    for at, count, n in equal_blocks(numel, SIGN_UNIT):
        part = packed[at // 8 : at // 8 + (count * size if n == SIGN_UNIT else (n + 7) // 8)]
        below[at : at + count * n] = unpack(part.reshape(count, -1), n, 1).reshape(-1) == 1
    return below
