"""The groups of Top-k and its like as tables on the device: which elements, which values and which bytes of indices."""

from typing import NamedTuple

import torch

from gradwire.core.payload import index_bytes, index_low_bits, kept_of
from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.launch import ELEMENTS

__all__ = ["BYTES", "ENTRIES", "Groups", "groups_of"]

BYTES = 512
"""Bytes of indices of a program."""
ENTRIES = 1024
"""Values of a program."""


class Groups(NamedTuple):
    """What the programs of each launch work on, all int64 but `kept`. A group without elements is in none of them."""

    programs: torch.Tensor
    """(programs, 4): first element in the flat buffer; elements; group; place of the first in the group."""
    of_program: torch.Tensor
    """The group of each program."""
    first_program: torch.Tensor
    """The first program of the group of each program."""
    program_spans: torch.Tensor
    """(groups, 2): first and end of its programs."""
    table: torch.Tensor
    """(groups, 4): first value; low bits of an index, -1 for a bitmap; first of its bits among all rows of bits; elements."""
    kept: torch.Tensor
    """int32: values of each group."""
    bytes: torch.Tensor
    """(programs, 8) of bytes of indices: byte in the payload; bytes; group; first bit; 1 if it is low bits; byte of the group's
    low bits in the payload; first value of the group; values of the group."""
    entries: torch.Tensor
    """(programs, 4) of values: first value; values; group; first value of the group."""
    pieces: torch.Tensor
    """(segments, 2): place in their group at which they begin; first element in the flat buffer."""
    pieces_of: torch.Tensor
    """(groups, 2): first and end of its segments in `pieces`."""
    steps: int
    """Halvings that find a place's segment."""
    values: int
    ones: int
    """Bits of all rows."""
    numel: int
    """Elements that the flat buffer has at least."""
    payload_bytes: int


def groups_of(segments: Segments, ratio: float, together: bool, itemsize: int) -> Groups:
    """The groups of these segments, made once and kept with them."""
    key = ("groups", ratio, together, itemsize)
    made = segments.launches.get(key)
    if made is None:
        made = segments.launches[key] = _groups(segments, ratio, together, itemsize)
    return made


def _groups(segments: Segments, ratio: float, together: bool, itemsize: int) -> Groups:
    members = [list(segments.rows)] if together else [[row] for row in segments.rows]
    members = [[row for row in rows if row.numel] for rows in members]
    members = [rows for rows in members if rows]
    programs: list[tuple[int, ...]] = []
    table: list[tuple[int, ...]] = []
    of_bytes: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    pieces_of: list[tuple[int, ...]] = []
    spans: list[tuple[int, ...]] = []
    kept: list[int] = []
    values = ones = 0
    byte = itemsize * sum(kept_of(sum(row.numel for row in rows), ratio) for rows in members)
    for group, rows in enumerate(members):
        numel, place = sum(row.numel for row in rows), 0
        k, begin, first_program = kept_of(numel, ratio), len(pieces), len(programs)
        low = index_low_bits(k, numel)
        for row in rows:
            if row.offset < 0:
                raise RuntimeError(f"a segment reaches past the flat buffer: {row}")
            pieces.append((place, row.offset))
            for at in range(0, row.numel, ELEMENTS):
                programs.append((row.offset + at, min(ELEMENTS, row.numel - at), group, place + at))
            place += row.numel
        pieces_of.append((begin, len(pieces)))
        spans.append((first_program, len(programs)))
        table.append((values, low, ones, numel))
        kept.append(k)
        low_bytes, size = (k * max(low, 0) + 7) // 8, index_bytes(k, numel)
        for start, length, is_low in ((byte, low_bytes, 1), (byte + low_bytes, size - low_bytes, 0)):
            for at in range(0, length, BYTES):
                of_bytes.append((start + at, min(BYTES, length - at), group, 8 * at, is_low, byte, values, k))
        entries += [(values + at, min(ENTRIES, k - at), group, values) for at in range(0, k, ENTRIES)]
        values, ones, byte = values + k, ones + 8 * (size - low_bytes), byte + size

    def on_device(rows: list[tuple[int, ...]], columns: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=segments.device).reshape(-1, columns)

    of_program = on_device([(row[2],) for row in programs], 1).flatten()
    return Groups(
        programs=on_device(programs, 4),
        of_program=of_program,
        first_program=on_device(spans, 2)[of_program, 0],
        program_spans=on_device(spans, 2),
        table=on_device(table, 4),
        kept=torch.tensor(kept, dtype=torch.int32, device=segments.device),
        bytes=on_device(of_bytes, 8),
        entries=on_device(entries, 4),
        pieces=on_device(pieces, 2),
        pieces_of=on_device(pieces_of, 2),
        steps=(max((end - begin for begin, end in pieces_of), default=1) - 1).bit_length(),
        values=values,
        ones=ones,
        numel=max((row.offset + row.numel for row in segments.rows), default=0),
        payload_bytes=byte,
    )
