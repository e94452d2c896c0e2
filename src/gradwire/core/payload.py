"""Bytes on the wire: pure formulas, shared by compressors, cost models and planner."""

from collections.abc import Iterable

__all__ = ["SCALE_ALIGN", "qsgd_bytes"]

SCALE_ALIGN = 16
"""The codes of a QSGD payload begin at a multiple of so many bytes after its scales."""


def qsgd_bytes(runs: Iterable[tuple[int, int]], block: int, scale: str) -> tuple[int, int]:
    """(scale bytes, code bytes) of a payload that holds runs of (numel elements, bits) each beginning a new block.

    A block of n elements has one bfloat16 scale (two with 'minmax') and ceil(n / 8) * bits code bytes.

    >>> qsgd_bytes([(256, 4), (1, 4)], block=128, scale="max")
    (16, 132)
    """
    blocks = codes = 0
    for numel, bits in runs:
        full, tail = divmod(numel, block)
        blocks += full + (tail > 0)
        codes += (full * (block // 8) + (tail + 7) // 8) * bits
    scales = blocks * (4 if scale == "minmax" else 2)
    return -(-scales // SCALE_ALIGN) * SCALE_ALIGN, codes
