"""Conversions, blocks, and codes of 1 to 8 bits packed in planes (see csrc/planes.hpp), which all reference kernels share."""

import torch
from torch import Tensor

from gradwire.kernels.segments import State

TINY = 2.0**-100  # below this a range of values counts as zero: 2^24 times its reciprocal would overflow
HUGE = 2.0**126  # from here on values count as not finite: the range or the rounded scale would overflow
LARGEST_BF16 = 0x7F7F
M32 = 0xFFFFFFFF


def narrow(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even, with one bit pattern for NaN (torch's differs between its SIMD paths)."""
    out = v.to(dtype)
    return out if dtype == torch.float32 else torch.where(out.isnan(), torch.full_like(out, float("nan")), out)


def equal_blocks(numel: int, block: int) -> list[tuple[int, int, int]]:
    """(start, number of blocks, elements of each): the full blocks, then the last partial one."""
    full, tail = divmod(numel, block)
    return [run for run in ((0, full, block), (full * block, 1, tail)) if run[1] and run[2]]


def given(src: Tensor, residual: State, where: slice | Tensor) -> Tensor:
    """The sum src + residual of these elements, in float32."""
    v = src[where].to(torch.float32)
    return v if residual is None else v + residual[where]


def norms(v: Tensor) -> Tensor:
    """The l2 norms of the rows of v, float64: squares are added in 16 lanes, and lanes are folded in halves."""
    lanes = torch.nn.functional.pad(v.double() ** 2, (0, -v.shape[1] % 16)).reshape(v.shape[0], -1, 16)
    total = lanes.cumsum(dim=1)[:, -1]
    for width in (8, 4, 2, 1):
        total = total[:, :width] + total[:, width : 2 * width]
    return total.sqrt()[:, 0]


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & M32


def float_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bf16_value(raw: Tensor) -> Tensor:
    """The float32 value of the bits of a bfloat16."""
    return (raw.to(torch.int32) << 16).view(torch.float32)


def bf16_up(magnitude_bits: Tensor) -> Tensor:
    return ((magnitude_bits + 0xFFFF) >> 16).clamp(max=LARGEST_BF16)


def bf16_towards(x: Tensor, up: bool) -> Tensor:
    bits = bits_of(x)
    magnitude, negative = bits & 0x7FFFFFFF, bits >> 31 == 1
    raw = torch.where(negative != up, bf16_up(magnitude), magnitude >> 16)
    return raw | torch.where(negative, 0x8000, 0)


def _planes(bits: int) -> list[tuple[int, int]]:
    """(width, shift) of each plane."""
    if bits == 8:
        return [(8, 0)]
    planes, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            planes.append((width, shift))
            shift += width
    return planes


def pack(codes: Tensor, bits: int) -> Tensor:
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    out = []
    for width, shift in _planes(bits):
        plane = (codes >> shift) & ((1 << width) - 1)
        parts = plane.reshape(codes.shape[0], 8 // width, -1)
        shifts = torch.arange(0, 8, width, device=codes.device).reshape(1, -1, 1)
        out.append((parts << shifts).sum(dim=1))
    return torch.cat(out, dim=1).to(torch.uint8)


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    m = (n + 7) // 8 * 8
    codes = torch.zeros(packed.shape[0], m, dtype=torch.int64, device=packed.device)
    at = 0
    for width, shift in _planes(bits):
        size = m * width // 8
        part = packed[:, at : at + size].to(torch.int64).unsqueeze(1)
        shifts = torch.arange(0, 8, width, device=packed.device).reshape(1, -1, 1)
        codes |= (((part >> shifts) & ((1 << width) - 1)) << shift).reshape(packed.shape[0], m)
        at += size
    return codes[:, :n]


def pack_base_3(codes: Tensor) -> Tensor:
    """Pack codes of three values, of shape (blocks, m), m a multiple of 64; see `gradwire.kernels.reference.scaled`."""
    pieces = codes.reshape(codes.shape[0], 8, -1)
    digits = torch.tensor([1, 3, 9, 27, 81], device=codes.device).reshape(1, -1, 1)
    first, rest = (pieces[:, :5] * digits).sum(dim=1), (pieces[:, 5:] * digits[:, :3]).sum(dim=1)
    return torch.cat([first.to(torch.uint8), pack(rest, 5)], dim=1)


def unpack_base_3(packed: Tensor, m: int) -> Tensor:
    first, rest = packed[:, : m // 8].to(torch.int64), unpack(packed[:, m // 8 :], m // 8, 5)
    digits = [first // 3**k % 3 for k in range(4)] + [first // 81, rest % 3, rest // 3 % 3, rest // 9]
    return torch.cat(digits, dim=1)
