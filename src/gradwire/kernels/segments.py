"""Segments: which elements of which tensors a flat buffer holds."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

State = torch.Tensor | None
"""The state that an encode keeps for each element, such as a residual or a momentum; None without state."""


class Segment(NamedTuple):
    """A run of elements of one tensor inside a flat buffer."""

    offset: int
    """Elements from the start of the flat buffer."""
    numel: int
    key: int
    """63 bits that name the tensor: `tensor_key(name)`."""
    first: int
    """The run's first element within its tensor, a multiple of the block. Random numbers are counted from the tensor's start."""
    bits: int
    """Bits an element, for compressors with different bits by tensor; else 0."""


@dataclass(frozen=True)
class Segments:
    """The segments of one flat buffer."""

    rows: tuple[Segment, ...]
    device: torch.device
    names: tuple[str, ...] = ()
    """The tensors' names, where they are known."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The tensors' shapes as they lie in memory, where they are known; () of one that is cut."""
    weights: torch.Tensor | None = field(default=None, compare=False)
    """The weights of the elements of the flat buffer, as long as it; see `gradwire.kernels.reference.weights`."""
    launches: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    """Tables of kernels for these segments, made once."""
    payload_bytes: dict[Any, int] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    """Sizes of payloads of these segments, by spec and dtype."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"launches": {}}  # addresses, which mean nothing elsewhere

    @cached_property
    def joined(self) -> "Segments":
        """Return the same elements, with neighbours of equal bits as one row. The row's random numbers continue those
        of the first tensor."""
        rows: list[Segment] = []
        for row in self.rows:
            if rows and rows[-1].offset + rows[-1].numel == row.offset and rows[-1].bits == row.bits:
                rows[-1] = rows[-1]._replace(numel=rows[-1].numel + row.numel)
            else:
                rows.append(row)
        return Segments(tuple(rows), self.device)

    @property
    def numel(self) -> int:
        return sum(row.numel for row in self.rows)

    @staticmethod
    def of(rows: Sequence[Segment], device: torch.device | str = "cpu") -> "Segments":
        return Segments(tuple(rows), torch.device(device))


class BatchPart(NamedTuple):
    segments: Segments
    first: int
    """Its first element in the flat buffer of the batch."""
    end: int
    byte: int
    """Its first byte in the memory of all payloads."""
    end_byte: int


@dataclass(frozen=True)
class Batch(Segments):
    """Segments of several payloads, which one call encodes or decodes."""

    parts: tuple[BatchPart, ...] = ()

    @property
    def nbytes(self) -> int:
        """The end of the last payload."""
        return self.parts[-1].end_byte

    @staticmethod
    def of_parts(parts: Sequence[BatchPart]) -> "Batch":
        rows = [row._replace(offset=row.offset + part.first) for part in parts for row in part.segments.rows]
        return Batch(tuple(rows), parts[0].segments.device, parts=tuple(parts))


def tensor_key(name: str) -> int:
    """63 bits that name a tensor, the same in every process and under every plan.

    >>> tensor_key("fc.weight") == tensor_key("fc.weight") != tensor_key("fc.bias")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
