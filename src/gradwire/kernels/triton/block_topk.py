"""Block Top-k: a call is one launch, and a program handles up to 1024 elements of a tensor. A program finds the smallest sent
magnitude of each block bit by bit. A block with damaged places becomes NaN; an error, as in the reference, would make the host
wait.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core import kept_of
from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import load_value, store_value
from gradwire.kernels.triton.launch import check_dst, check_flat, check_payload, launch, made_once, reach_of, table_of
from gradwire.kernels.triton.numbers import magnitude, narrow, one_nan, widen
from gradwire.kernels.triton.selection import key_of

ELEMENTS = 1024
"""Elements of a program. The registers of a thread do not hold those of 4096."""


@triton.jit
def block_program(table):
    """(first element, elements, elements of a block, first value, values of a block) of this program."""
    row = table + tl.program_id(0) * 5
    numel, n, kept = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32), tl.load(row + 4).to(tl.int32)
    return tl.load(row), numel, n, tl.load(row + 3), kept


@triton.jit
def block_topk_encode_kernel(
    src, residual, table, values, places, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Blocks of n elements, of each of which `kept` are sent, of equal ones the first."""
    first, numel, n, first_value, kept = block_program(table)
    block, i = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (i < n) & (block * n + i < numel)
    at = first + block * n + i
    value = load_value(src, residual, at, inside, RESIDUAL)
    key = tl.where(inside, key_of(value), -1)

    least = tl.zeros([ROWS], tl.int32)
    for step in range(31):
        more = least | (1 << (30 - step))
        reach = tl.sum((key >= more[:, None]).to(tl.int32), axis=1)
        least = tl.where(reach >= kept, more, least)
    larger, equal = key > least[:, None], key == least[:, None]
    need = kept - tl.sum(larger.to(tl.int32), axis=1)
    chosen = larger | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= need[:, None]))
    place = first_value + block * kept + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    chosen &= inside

    sent = narrow(one_nan(value), src.dtype.element_ty)
    tl.store(values + place, sent, mask=chosen)
    tl.store(places + place, (i + block * 0).to(tl.uint8), mask=chosen)
    if RESIDUAL:
        carried = inside & (magnitude(widen(narrow(value, src.dtype.element_ty))) < 0x7F800000)
        tl.store(residual + at, tl.where(chosen, value - widen(sent), value), mask=carried)


@triton.jit
def block_topk_decode_kernel(
    values, places, table, dst, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, ADD: tl.constexpr
):
    """Decode a block; the opposite of block_topk_encode_kernel. KEPT: a power of two, not less than the values of a block."""
    first, numel, n, first_value, kept = block_program(table)
    block, i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, KEPT)[None, :]
    inside = (i < n) & (block * n + i < numel)
    there = (j < kept) & (block * n < numel)
    at = first_value + block * kept + j
    place = tl.load(places + at, mask=there, other=0).to(tl.int32)
    before = tl.load(places + at - 1, mask=there & (j > 0), other=0).to(tl.int32)
    before = tl.where(j > 0, before, -1)
    wrong = tl.max((there & ((place <= before) | (place >= n))).to(tl.int32), axis=1)[:, None] > 0
    clear = tl.where(wrong, float("nan"), 0.0) + tl.zeros([ROWS, BLOCK], tl.float32)
    if ADD:
        inside &= wrong
    tl.store(dst + first + block * n + i, narrow(clear, dst.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # values come after the zeros, whichever threads write them
    there &= wrong == 0
    value = widen(tl.load(values + at, mask=there, other=0.0))
    store_value(dst + first + block * n + place, value, there, ADD)


class _Blocks(NamedTuple):
    table: Tensor
    """int64 of shape (programs, 5), see block_program."""
    numel: int
    values: int


def block_topk_encode(src: Tensor, residual: State, segments: Segments, ratio: float, block: int, payload: Tensor) -> None:
    blocks = _blocks_of(segments, ratio, block)
    check_flat(src, blocks.numel, [residual])
    check_payload(payload, blocks.values * (src.itemsize + 1))
    if blocks.values:
        values = torch.empty(blocks.values, dtype=src.dtype, device=src.device)
        launch(
            block_topk_encode_kernel, len(blocks.table), src, residual, blocks.table, values, payload[values.nbytes :],
            ROWS=ELEMENTS // block, BLOCK=block, RESIDUAL=residual is not None,
        )  # fmt: skip
        payload[: values.nbytes].copy_(values.view(torch.uint8))


def block_topk_decode(
    payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, block: int, add: bool, dst: Tensor
) -> None:
    """`reference.block_topk_decode`, but a block whose places are damaged becomes NaN."""
    blocks = _blocks_of(segments, ratio, block)
    check_dst(dst, blocks.numel, add)
    check_payload(payload, blocks.values * (dtype.itemsize + 1))
    if blocks.values:
        size = blocks.values * dtype.itemsize
        values, most = payload[:size].clone().view(dtype), kept_of(block, ratio)
        launch(
            block_topk_decode_kernel, len(blocks.table), values, payload[size:], blocks.table, dst,
            ROWS=ELEMENTS // block, BLOCK=block, KEPT=triton.next_power_of_2(most), ADD=add,
        )  # fmt: skip


@made_once
def _blocks_of(segments: Segments, ratio: float, block: int) -> _Blocks:
    if block & (block - 1) or not 32 <= block <= 256:
        raise RuntimeError(f"a block of {block} elements is not a power of two from 32 to 256: a place is one byte")
    rows, values, each = [], 0, ELEMENTS
    for row in segments.rows:
        full = row.numel // block * block
        for start, end, n in ((0, full, block), (full, row.numel, row.numel - full)):
            for at in range(start, end, each):
                numel, kept = min(each, end - at), kept_of(n, ratio)
                rows.append((row.offset + at, numel, n, values, kept))
                values += numel // n * kept
    return _Blocks(table_of(rows, 5, segments), reach_of(segments), values)
