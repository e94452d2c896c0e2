"""Bytes on the wire: pure formulas, shared by specs, kernels, cost models and planner."""

from collections.abc import Iterable
from typing import NamedTuple

RAW = -1
"""Value of `ElementRun.bits` for elements that travel uncompressed in a payload of compressed ones."""
SCALE_ALIGN = 16
"""The codes of a payload begin after the scales, at a multiple of this number of bytes."""
SIGN_UNIT = 512
"""Elements in a unit of packed signs."""


class Sections(NamedTuple):
    """Bytes of the two sections of a payload."""

    scales: int
    codes: int


def in_base_3(numel: int, block: int, bits: int, ternary: bool) -> bool:
    """Whether a block's codes are packed in base 3: codes of 2 bits that stand for three values, in whole blocks."""
    return ternary and bits == 2 and numel == block and block % 64 == 0


def code_bytes(numel: int, block: int, bits: int, ternary: bool) -> int:
    """Bytes of the codes of `numel` elements in blocks of `block` elements.

    >>> code_bytes(128, 128, 2, ternary=False), code_bytes(128, 128, 2, ternary=True)
    (32, 26)
    """
    return numel // 64 * 13 if in_base_3(numel, block, bits, ternary) else (numel + 7) // 8 * bits


def coded_bytes(runs: Iterable[tuple[int, int]], block: int, scales: int = 1, ternary: bool = False) -> Sections:
    """A payload that holds runs of (numel elements, bits), each beginning a new block; block 0: a run is one block.

    A block of n elements has `scales` bfloat16 scales and ceil(n / 8) * bits code bytes. ternary: codes of 2 bits stand for three
    values, and whole blocks are packed in base 3.

    >>> coded_bytes([(256, 4), (1, 4)], block=128)
    Sections(scales=16, codes=132)
    """
    blocks = codes = 0
    for numel, bits in runs:
        full, tail = divmod(numel, block) if block else (0, numel)
        blocks += full + (tail > 0)
        codes += full * code_bytes(block, block, bits, ternary) + code_bytes(tail, 0, bits, False)
    return Sections(-(-blocks * 2 * scales // SCALE_ALIGN) * SCALE_ALIGN, codes)


def qsgd_bytes(runs: Iterable[tuple[int, int]], block: int, scale: str, levels: str = "uniform") -> Sections:
    """`coded_bytes` of a QSGD payload: 'minmax' has two scales a block, the others one. With uniform levels around zero 2 bits
    are minus one, zero or one."""
    return coded_bytes(runs, block, 2 if scale == "minmax" else 1, scale != "minmax" and levels == "uniform")


def kept_of(numel: int, ratio: float) -> int:
    """The number of elements that a sparsifier sends of a run: at least one, if the run has any.

    >>> kept_of(1000, 0.01), kept_of(5, 0.01), kept_of(0, 0.01)
    (10, 1, 0)
    """
    return min(numel, max(1, -int(-ratio * numel // 1))) if numel else 0


def index_low_bits(kept: int, numel: int) -> int:
    """The number of low bits of an index that are sent as plain bits; -1 if a bitmap of all elements is smaller.

    Ascending indices are sent in Elias and Fano's form: the low bits of each, packed, and the rest in unary, as a row
    of bits in which the i-th one stands at (index >> low) + i. The size depends only on `kept` and `numel`.
    """
    low = max(0, (numel // kept).bit_length() - 1) if kept else 0
    return low if _elias_fano(kept, numel, low) < (numel + 7) // 8 else -1


def index_bytes(kept: int, numel: int) -> int:
    """Bytes of `kept` ascending indices below `numel`.

    >>> index_bytes(10, 1000), index_bytes(500, 1000)
    (12, 125)
    """
    low = index_low_bits(kept, numel)
    return (numel + 7) // 8 if low < 0 else _elias_fano(kept, numel, low)


def _elias_fano(kept: int, numel: int, low: int) -> int:
    return (kept * low + 7) // 8 + (kept + (numel >> low) + 7) // 8
