"""Packing codes of 1 to 8 bits in planes. See csrc/planes.hpp."""

import torch
from torch import Tensor


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
