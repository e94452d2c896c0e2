"""CRC32C in plain Python, the reference of csrc/api_checksum.cpp, which uses the processor's instruction."""

import torch

_POLYNOMIAL, _ALL = 0x82F63B78, 0xFFFFFFFF
"""The highest power is in the lowest bit."""
_TABLE = list(range(256))
"""The state that each byte makes of a state of zero."""
for _ in range(8):
    _TABLE = [state >> 1 ^ (state & 1) * _POLYNOMIAL for state in _TABLE]


def crc32c(values: torch.Tensor) -> int:
    """The CRC32C (RFC 3720, appendix B.4) of the bytes of a contiguous CPU tensor."""
    state = _ALL
    for byte in values.detach().reshape(-1).view(torch.uint8).numpy().tobytes():
        state = _TABLE[(state ^ byte) & 255] ^ state >> 8
    return state ^ _ALL
