"""Indices of the elements that were sent, in a bitmap or in Elias and Fano's form: see reference/indices.py.

A row of bits is a byte for each bit while it is made: programs set ones without waiting for each other, and a launch packs all
rows. When it is read, the place of a one among all ones says which index it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.groups import BYTES, ENTRIES, Groups
from gradwire.kernels.triton.launch import launch


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
