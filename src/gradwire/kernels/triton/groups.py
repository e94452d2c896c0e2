"""The groups of Top-k and its like as tables on the device: which elements, which values and which bytes of indices."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.payload import index_bytes, index_low_bits, kept_of
from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.launch import ELEMENTS, made_once, reach_of, table_of

BYTES = 512
"""Bytes of indices of a program."""
ENTRIES = 1024
"""Values of a program."""


class Groups(NamedTuple):
    """What the programs of each launch work on, all int64 but `kept`. A group without elements is in none of them."""

    programs: Tensor
    """(programs, 4): first element in the flat buffer; elements; group; place of the first in the group."""
    of_program: Tensor
    """The group of each program."""
    first_program: Tensor
    """The first program of the group of each program."""
    program_spans: Tensor
    """(groups, 2): first and end of its programs."""
    table: Tensor
    """(groups, 4): first value; low bits of an index, -1 for a bitmap; first of its bits among all rows of bits; elements."""
    kept: Tensor
    """int32: values of each group."""
    bytes: Tensor
    """(programs, 8) of bytes of indices: byte in the payload; bytes; group; first bit; 1 if it is low bits; byte of the group's
    low bits in the payload; first value of the group; values of the group."""
    entries: Tensor
    """(programs, 4) of values: first value; values; group; first value of the group."""
    pieces: Tensor
    """(segments, 2): place in their group at which they begin; first element in the flat buffer."""
    pieces_of: Tensor
    """(groups, 2): first and end of its segments in `pieces`."""
    steps: int
    """Halvings that find a place's segment."""
    values: int
    ones: int
    """Bits of all rows."""
    numel: int
    """Elements that the flat buffer has at least."""
    payload_bytes: int


@made_once
def groups_of(segments: Segments, ratio: float, together: bool, itemsize: int) -> Groups:
    """The groups of these segments."""
    filled = [row for row in segments.rows if row.numel]
    members = [[row] for row in filled] if not together else [filled] if filled else []
    programs, table, of_bytes, entries = (list[tuple[int, ...]]() for _ in range(4))
    pieces, pieces_of, spans = (list[tuple[int, ...]]() for _ in range(3))
    kept: list[int] = []
    values = ones = 0
    byte = itemsize * sum(kept_of(sum(row.numel for row in rows), ratio) for rows in members)
    for group, rows in enumerate(members):
        numel, place = sum(row.numel for row in rows), 0
        k, begin, first_program = kept_of(numel, ratio), len(pieces), len(programs)
        low = index_low_bits(k, numel)
        for row in rows:
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
    program_table, program_spans = table_of(programs, 4, segments), table_of(spans, 2, segments)
    of_program = program_table[:, 2].contiguous()
    return Groups(
        programs=program_table,
        of_program=of_program,
        first_program=program_spans[of_program, 0],
        program_spans=program_spans,
        table=table_of(table, 4, segments),
        kept=torch.tensor(kept, dtype=torch.int32, device=segments.device),
        bytes=table_of(of_bytes, 8, segments),
        entries=table_of(entries, 4, segments),
        pieces=table_of(pieces, 2, segments),
        pieces_of=table_of(pieces_of, 2, segments),
        steps=(max((end - begin for begin, end in pieces_of), default=1) - 1).bit_length(),
        values=values,
        ones=ones,
        numel=reach_of(segments),
        payload_bytes=byte,
    )
