"""Ascending indices below n in few bytes: a bitmap, or Elias and Fano's form. See gradwire.core.payload.index_low_bits.

Elias-Fano: the `low` lowest bits of each index, packed, up to a whole byte; then a row of bits in which the i-th index sets
bit (index >> low) + i, up to a whole byte. Bits count from the lowest of the first byte.
"""

import torch
from torch import Tensor

from gradwire.core import index_low_bits

DAMAGED = "the payload's indices are damaged"


def write_indices(index: Tensor, n: int) -> Tensor:
    """Write ascending indices (int64) below n as bytes (uint8)."""
    k = index.numel()
    low = index_low_bits(k, n)
    if low < 0:
        return _packed(_row_of(index, n))
    parts = (index.unsqueeze(1) >> torch.arange(low, device=index.device)) & 1
    unary = _row_of((index >> low) + torch.arange(k, device=index.device), k + (n >> low))
    return torch.cat([_packed(parts.reshape(-1)), _packed(unary)])


def read_indices(data: Tensor, k: int, n: int) -> Tensor:
    """Read the k indices (int64) below n from their bytes.

    Raises RuntimeError if there are not exactly k, if they do not ascend or if one is not below n.
    """
    low = index_low_bits(k, n)
    start = 0 if low < 0 else (k * low + 7) // 8
    index = _bits(data[start:]).nonzero().flatten()
    if index.numel() != k:
        raise RuntimeError(DAMAGED)
    if low >= 0:
        places = torch.arange(low, device=data.device)
        parts = (_bits(data[:start])[: k * low].reshape(k, low) << places).sum(dim=1)
        index = ((index - torch.arange(k, device=data.device)) << low) | parts
    if k and (int(index[-1]) >= n or not bool((index.diff() > 0).all())):
        raise RuntimeError(DAMAGED)
    return index


def _row_of(ones: Tensor, n: int) -> Tensor:
    row = torch.zeros(n, dtype=torch.int64, device=ones.device)
    row[ones] = 1
    return row


def _packed(bits: Tensor) -> Tensor:
    eights = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).reshape(-1, 8)
    return (eights << torch.arange(8, device=bits.device)).sum(dim=1).to(torch.uint8)


def _bits(data: Tensor) -> Tensor:
    return ((data.to(torch.int64).unsqueeze(1) >> torch.arange(8, device=data.device)) & 1).reshape(-1)
