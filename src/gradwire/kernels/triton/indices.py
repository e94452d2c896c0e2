"""The groups of sparse compressors as tables on the device, and the indices of the sent elements, as a bitmap or in Elias and
Fano's form (see reference/indices.py).

While a row of bits is made, each bit is a byte, so that programs set ones without waiting for each other. One launch packs all
rows. While a row is read, the position of a one among all ones is the number of its index.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core import index_bytes, index_low_bits, kept_of
from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.launch import ELEMENTS, launch, made_once, put_on, reach_of, table_of

BYTES = 128
"""Bytes of indices of a program. The registers of a thread do not hold the bits of 512."""
ENTRIES = 1024
"""Values of a program."""


class Groups(NamedTuple):
    """The tables of the programs of each launch, all int64 but `kept`. A group without elements is in none of them."""

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
        kept=put_on(segments.device, torch.tensor(kept, dtype=torch.int32, device="cpu")),
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


@triton.jit
def byte_program(table):
    """The columns of `Groups.bytes` of this program."""
    row = table + tl.program_id(0) * 8
    at, count, group, first_bit = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    return at, count, group, first_bit, tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)


@triton.jit
def pack_kernel(indices, ones, table, group_table, payload, BYTES: tl.constexpr):
    """Bytes of low bits, or of a row of ones."""
    at, count, group, first_bit, is_low, _, first_value, kept = byte_program(table)
    low, first_one = tl.load(group_table + group * 4 + 1), tl.load(group_table + group * 4 + 2)
    byte = tl.arange(0, BYTES)
    packed = tl.zeros([BYTES], tl.int32)
    for k in tl.static_range(8):
        bit = first_bit + byte * 8 + k
        if is_low != 0:
            which = bit // low
            index = tl.load(indices + first_value + which, mask=(byte < count) & (which < kept), other=0)
            one = ((index >> (bit % low)) & 1).to(tl.int32)
        else:
            one = tl.load(ones + first_one + bit, mask=byte < count, other=0).to(tl.int32)
        packed |= one << k
    tl.store(payload + at + byte, packed.to(tl.uint8), mask=byte < count)


@triton.jit
def row_bits(payload, at, count, BYTES: tl.constexpr):
    """The bits of bytes of a row, 0 or 1."""
    byte, k = tl.arange(0, BYTES)[:, None], tl.arange(0, 8)[None, :]
    packed = tl.load(payload + at + byte, mask=byte < count, other=0).to(tl.int32)
    return tl.reshape((packed >> k) & 1, [BYTES * 8])


@triton.jit
def count_ones_kernel(payload, table, counts, BYTES: tl.constexpr):
    """How many ones each program has; none in low bits."""
    at, count, _, _, is_low, _, _, _ = byte_program(table)
    found = tl.sum(row_bits(payload, at, tl.where(is_low != 0, 0, count), BYTES))
    tl.store(counts + tl.program_id(0), found.to(tl.int64))


@triton.jit
def find_indices_kernel(payload, table, group_table, before, indices, BYTES: tl.constexpr):
    """The index that each one of a row stands for; before: how many ones the programs before have."""
    at, count, group, first_bit, is_low, low_at, first_value, kept = byte_program(table)
    low = tl.load(group_table + group * 4 + 1)
    one = row_bits(payload, at, tl.where(is_low != 0, 0, count), BYTES)
    bit = first_bit + tl.arange(0, BYTES * 8)
    which = tl.load(before + tl.program_id(0)) + tl.cumsum(one) - 1
    meant = (one > 0) & (which < kept)
    if low < 0:
        tl.store(indices + first_value + which, bit, mask=meant)
    else:
        part, begin, end = tl.zeros([BYTES * 8], tl.int64), which * low, kept * low
        for k in tl.static_range(5):  # 7 + 31 bits at most
            byte = begin // 8 + k
            found = tl.load(payload + low_at + byte, mask=meant & (byte * 8 < end), other=0)
            part |= found.to(tl.int64) << (8 * k)
        part = (part >> (begin % 8)) & ((tl.full([1], 1, tl.int64) << low) - 1)
        tl.store(indices + first_value + which, ((bit - which) << low) | part, mask=meant)


@triton.jit
def check_kernel(indices, entries, group_table, damaged, ENTRIES: tl.constexpr):
    """Marks a group whose indices do not ascend, or do not lie in it."""
    row = entries + tl.program_id(0) * 4
    first, count, group, first_value = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    i = tl.arange(0, ENTRIES)
    index = tl.load(indices + first + i, mask=i < count, other=0)
    last = tl.load(indices + first + i - 1, mask=(i < count) & (first + i > first_value), other=-1)
    wrong = (i < count) & ((index <= last) | (index >= tl.load(group_table + group * 4 + 3)))
    tl.store(damaged + group, 1, mask=tl.max(wrong.to(tl.int32)) > 0)


def pack_indices(indices: Tensor, ones: Tensor, groups: Groups, payload: Tensor) -> None:
    """Write the bytes of all groups' indices; ones: their rows, a byte a bit."""
    launch(pack_kernel, len(groups.bytes), indices, ones, groups.bytes, groups.table, payload, BYTES=BYTES)


def unpack_indices(payload: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The places in their group of all values, int64, and which groups' indices are damaged, int32."""
    device, programs = payload.device, len(groups.bytes)
    counts = torch.empty(programs, dtype=torch.int64, device=device)
    indices = torch.zeros(groups.values, dtype=torch.int64, device=device)
    launch(count_ones_kernel, programs, payload, groups.bytes, counts, BYTES=BYTES)
    of_group = torch.zeros(len(groups.table), dtype=torch.int64, device=device)
    of_group.index_add_(0, groups.bytes[:, 2], counts)
    before = counts.cumsum(0) - counts - (of_group.cumsum(0) - of_group)[groups.bytes[:, 2]]
    damaged = (of_group != groups.kept).to(torch.int32)
    launch(find_indices_kernel, programs, payload, groups.bytes, groups.table, before, indices, BYTES=BYTES)
    launch(check_kernel, len(groups.entries), indices, groups.entries, groups.table, damaged, ENTRIES=ENTRIES)
    return indices, damaged
