"""CRC32C in plain torch, the reference of csrc/api_checksum.cpp, which uses the processor's instruction."""

import torch

_POLYNOMIAL, _ONE, _ALL = 0x82F63B78, 0x80000000, 0xFFFFFFFF
"""Polynomials over two numbers, the highest power in the lowest bit."""


def crc32c(values: torch.Tensor) -> int:
    """The CRC32C (RFC 3720, appendix B.4) of the bytes of a contiguous CPU tensor.

    Rows of equal length are computed in parallel. Zeros before the first byte change nothing, so the first row may have some.
    """
    if not values.numel():
        return 0
    given = values.detach().reshape(-1).view(torch.uint8).to(torch.int64)
    length = 1 << (given.numel().bit_length() // 2)
    rows = 1 << (-(-(given.numel() + 4) // length) - 1).bit_length()
    padded = torch.zeros(rows * length, dtype=torch.int64)
    padded[-given.numel() :] = given
    # the checksum's state begins with 32 ones: put four bytes before the first one that give this state
    begin = padded.numel() - given.numel() - 4
    padded[begin : begin + 4] = torch.tensor([_before(_ALL) >> shift & 255 for shift in (0, 8, 16, 24)])
    byte = torch.arange(256)
    for _ in range(8):
        byte = _times_x(byte)
    crc = torch.zeros(rows, dtype=torch.int64)
    for column in padded.reshape(rows, length).unbind(1):
        crc = byte[(crc ^ column) & 255] ^ (crc >> 8)
    behind = torch.tensor(_ONE)
    for _ in range(8 * length):
        behind = _times_x(behind)
    while len(crc) > 1:
        crc = _multiply(crc[::2], behind) ^ crc[1::2]
        behind = _multiply(behind, behind)
    return int(crc) ^ _ALL


def _before(crc: int) -> int:
    """The four bytes that turn a state of zero into this checksum."""
    for _ in range(32):
        crc = (crc << 1 & _ALL) ^ ((_POLYNOMIAL << 1 & _ALL) | 1 if crc & _ONE else 0)
    return crc


def _times_x(a: torch.Tensor) -> torch.Tensor:
    return (a >> 1) ^ (a & 1) * _POLYNOMIAL


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = torch.zeros_like(a)
    for power in range(32):
        product = product ^ (a >> (31 - power) & 1) * b
        b = _times_x(b)
    return product
