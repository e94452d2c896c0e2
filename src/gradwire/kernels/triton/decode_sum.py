"""The payloads of all ranks decoded and added up in one launch: of formats whose kernels are in `coded`. A program decodes its
elements of one payload after another, in rank order, so sums have the bits of one launch for each rank."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import KernelCall
from gradwire.kernels.triton import coded
from gradwire.kernels.triton.blocks import store_value
from gradwire.kernels.triton.coded import decode_blocks
from gradwire.kernels.triton.launch import check_dst, check_payload, launch, program
from gradwire.kernels.triton.levels import E4M3, E5M2, EXPONENTIAL, FITTED, FIXED, LLOYD, MAX, MINMAX, NATURAL, THRESHOLD
from gradwire.kernels.triton.numbers import widen

FORMATS: dict[str, Callable[..., tuple[Any, int, float]]] = {
    "qsgd_decode": lambda block, scale: (MINMAX if scale == "minmax" else MAX, block, 0.0),
    "natural_decode": lambda block: (NATURAL, block, 0.0),
    "exponential_decode": lambda block: (EXPONENTIAL, block, 0.0),
    "fp8_decode": lambda block, form: (E4M3 if form == "e4m3" else E5M2, block, 0.0),
    "fitted_decode": lambda weights, block, levels: (LLOYD if levels == "lloyd" else FITTED, block, 0.0),
    "threshold_decode": lambda block, threshold: (FIXED if threshold else THRESHOLD, block, threshold),
}
"""Format, block and factor of a kernel's settings."""
OWN_ELEMENTS = tl.constexpr(1024)


@triton.jit
def decode_term(
    dst, scales, codes, numel, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, FACTOR: tl.constexpr, ADD: tl.constexpr, TERNARY: tl.constexpr,
):  # fmt: skip
    """Write or add one rank's values."""
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, dst, scales, codes, blocks, BLOCK, bits, ROWS, BLOCK, CODE, FACTOR, ADD, False, TERNARY, True)
    else:
        decode_blocks(dst, dst, scales, codes, 1, numel, bits, 1, BLOCK, CODE, FACTOR, ADD, False, TERNARY, False)
    tl.debug_barrier()  # the next term may be added by other threads


@triton.jit
def own_term(dst, own, numel, ADD: tl.constexpr):
    """Write or add the own values."""
    for at in range(0, numel, OWN_ELEMENTS):
        place = at + tl.arange(0, OWN_ELEMENTS)
        inside = place < numel
        store_value(dst + place, widen(tl.load(own + place, mask=inside, other=0.0)), inside, ADD)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["before", "after"])
def coded_sum_kernel(
    payload, table, own, dst, stride, before, after,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, FACTOR: tl.constexpr, OWN: tl.constexpr,
    TERNARY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs. `before` payloads lie before the place of the own rank, which is not read, `after` behind
    it. OWN: the own values are a term; else dst holds them already."""
    first, numel, scale, _, code, _, _, bits = program(table, ALIGNED)
    dst += first
    scales, codes = payload + scale, payload + code
    if OWN:
        own += first
        if before > 0:
            decode_term(dst, scales, codes, numel, bits, ROWS, BLOCK, CODE, FACTOR, False, TERNARY)
        else:
            own_term(dst, own, numel, False)
    for source in range(0, before):
        if source > 0 or not OWN:
            decode_term(dst, scales, codes, numel, bits, ROWS, BLOCK, CODE, FACTOR, True, TERNARY)
        scales += stride
        codes += stride
    if OWN and before > 0:
        own_term(dst, own, numel, True)
    for _ in range(0, after):
        scales += stride
        codes += stride
        decode_term(dst, scales, codes, numel, bits, ROWS, BLOCK, CODE, FACTOR, True, TERNARY)


def decode_sum(terms: list[KernelCall], payloads: Tensor, stride: int, before: int, after: int, own: Tensor | None) -> None:
    """Run these calls, the terms of a sum in the order of ranks, in one launch. payloads: of all ranks, at multiples of `stride`.
    The place of the own rank, behind `before` others, is not read. own: the own values; None if the sum holds them already."""
    name, payload, segments, *settings, _, dst = next(call for call in terms if call[0] in FORMATS)
    code, block, factor = FORMATS[name](*settings)
    programs = coded._programs(segments, block, code.value)
    check_dst(dst, programs.numel, True)
    check_payload(payload, programs.payload_bytes)
    launch(
        coded_sum_kernel, len(programs.table), payloads, programs.table, own, dst, stride, before, after,
        FACTOR=float(factor), OWN=own is not None, **coded._constants(programs, block, code.value),
    )  # fmt: skip
