"""Top-k, Threshold and DGC. Encoding is eleven launches and some small operations of torch, decoding five, whatever the number
of groups; see selection.py and indices.py.

A group whose indices are damaged becomes NaN throughout: to raise an error as the reference does, the host would have to wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import Segments, State
from gradwire.kernels.triton.blocks import store_value
from gradwire.kernels.triton.indices import ENTRIES, Groups, groups_of, pack_indices, unpack_indices
from gradwire.kernels.triton.launch import ELEMENTS, check_dst, check_flat, check_payload, launch
from gradwire.kernels.triton.numbers import narrow, widen
from gradwire.kernels.triton.selection import Given, chosen_counts, element_program, select, send_kernel


@triton.jit
def squares_kernel(src, table, squares, TILE: tl.constexpr):
    """float64 sums of the squares of each program's elements."""
    first, numel, _, _ = element_program(table)
    i = tl.arange(0, TILE)
    value = widen(tl.load(src + first + i, mask=i < numel, other=0.0)).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


@triton.jit
def norm_kernel(squares, spans, norms, TILE: tl.constexpr):
    """The norm of each group, in an order that depends on nothing but its size."""
    group, i = tl.program_id(0), tl.arange(0, TILE)
    first, end = tl.load(spans + group * 2), tl.load(spans + group * 2 + 1)
    total = tl.zeros([TILE], tl.float64)
    for at in range(first, end, TILE):
        total += tl.load(squares + at + i, mask=at + i < end, other=0.0)
    tl.store(norms + group, tl.sqrt(tl.sum(total)))


@triton.jit
def clear_kernel(dst, table, damaged, ADD: tl.constexpr, TILE: tl.constexpr):
    """Zeros to write values into, unless they are added; NaN in groups that are damaged."""
    first, numel, group, _ = element_program(table)
    i, wrong = tl.arange(0, TILE), tl.load(damaged + group) != 0
    value = tl.zeros([TILE], tl.float32) + tl.where(wrong, float("nan"), 0.0)
    if ADD:
        numel = tl.where(wrong, numel, 0)
    tl.store(dst + first + i, narrow(value, dst.dtype.element_ty), mask=i < numel)


@triton.jit
def write_kernel(
    values, indices, damaged, entries, pieces, pieces_of, dst,
    STEPS: tl.constexpr, ADD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Values to their places; the segment of a place is found by halving."""
    row = entries + tl.program_id(0) * 4
    first, count, group = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    i = tl.arange(0, ENTRIES)
    inside = i < tl.where(tl.load(damaged + group) == 0, count, 0)
    index = tl.load(indices + first + i, mask=inside, other=0)
    piece, end = tl.load(pieces_of + group * 2) + tl.zeros([ENTRIES], tl.int64), tl.load(pieces_of + group * 2 + 1)
    for step in tl.static_range(STEPS):
        later = piece + (1 << (STEPS - 1 - step))
        begins = tl.load(pieces + later * 2, mask=inside & (later < end), other=0)
        piece = tl.where((later < end) & (begins <= index), later, piece)
    begins = tl.load(pieces + piece * 2, mask=inside, other=0)
    at = dst + tl.load(pieces + piece * 2 + 1, mask=inside, other=0) + index - begins
    value = widen(tl.load(values + first + i, mask=inside, other=0.0))
    store_value(at, value, inside, ADD)


def topk_encode(
    src: Tensor, residual: State, segments: Segments, ratio: float, together: bool, threshold: float, payload: Tensor
) -> None:
    groups = groups_of(segments, ratio, together, src.itemsize)
    check_flat(src, groups.numel, [residual])
    check_payload(payload, groups.payload_bytes)
    _send(Given(src, residual), groups, threshold, payload)


def dgc_encode(
    src: Tensor, residual: State, momentum: State, segments: Segments, ratio: float, decay: float, bound: float, payload: Tensor
) -> None:
    """`reference.dgc_encode`. Norms are summed in float64 in another order: what brings one back to the bound can differ in
    the last bit of a float32, once in some hundred million times."""
    groups = groups_of(segments, ratio, False, src.itemsize)
    check_flat(src, groups.numel, [residual, momentum])
    check_payload(payload, groups.payload_bytes)
    if residual is None or momentum is None:
        residual = momentum = None
    factors = _clipping(src, groups, bound) if bound and groups.values else None
    _send(Given(src, residual, momentum, decay, factors), groups, 0.0, payload)


def topk_decode(
    payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, together: bool, add: bool, dst: Tensor
) -> None:
    """`reference.topk_decode`, but a group whose indices are damaged becomes NaN."""
    groups = groups_of(segments, ratio, together, dtype.itemsize)
    check_dst(dst, groups.numel, add)
    check_payload(payload, groups.payload_bytes)
    if not groups.values:
        return
    values = payload[: groups.values * dtype.itemsize].clone().view(dtype)
    indices, damaged = unpack_indices(payload, groups)
    launch(clear_kernel, len(groups.programs), dst, groups.programs, damaged, ADD=add, TILE=ELEMENTS)
    launch(
        write_kernel, len(groups.entries), values, indices, damaged, groups.entries, groups.pieces, groups.pieces_of, dst,
        STEPS=groups.steps, ADD=add, ENTRIES=ENTRIES,
    )  # fmt: skip


def _send(given: Given, groups: Groups, floor: float, payload: Tensor) -> None:
    if not groups.values:
        return
    src = given.src
    least, need = select(given, groups)
    take, base = chosen_counts(given, groups, least, need)
    values = torch.empty(groups.values, dtype=src.dtype, device=src.device)
    indices = torch.empty(groups.values, dtype=torch.int64, device=src.device)
    ones = torch.zeros(groups.ones, dtype=torch.uint8, device=src.device)
    launch(
        send_kernel, len(groups.programs), *given.arguments, groups.programs, groups.table, least, take, base,
        float(floor), values, indices, ones, TILE=ELEMENTS, num_warps=8, **given.constants,
    )  # fmt: skip
    payload[: values.nbytes].copy_(values.view(torch.uint8))
    pack_indices(indices, ones, groups, payload)


def _clipping(src: Tensor, groups: Groups, bound: float) -> Tensor:
    """The factor that brings the norm of each group back to the bound, if the norm is larger and finite."""
    squares = torch.empty(len(groups.programs), dtype=torch.float64, device=src.device)
    norms = torch.empty(len(groups.table), dtype=torch.float64, device=src.device)
    launch(squares_kernel, len(groups.programs), src, groups.programs, squares, TILE=ELEMENTS)
    launch(norm_kernel, len(groups.table), squares, groups.program_spans, norms, TILE=256, num_warps=1)
    larger = (norms > bound) & (norms < float("inf"))
    return torch.where(larger, (bound / norms).to(torch.float32), 1.0)
