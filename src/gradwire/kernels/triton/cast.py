"""Casts to half the bytes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import State
from gradwire.kernels.triton.blocks import load_value, store_value
from gradwire.kernels.triton.launch import check_flat, check_payload, launch
from gradwire.kernels.triton.numbers import load_u16, magnitude, narrow_u16, store_u16, widen_u16

TILE = 2048
"""Elements of a program."""


@triton.jit
def cast_encode_kernel(
    src, residual, payload, numel, BF16: tl.constexpr, RESIDUAL: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr
):
    """Bits of src (+ residual) as bfloat16 or float16; what overflows leaves the residual as it was."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    value = load_value(src, residual, at, inside, RESIDUAL)
    sent = narrow_u16(value, BF16)
    store_u16(payload + at * (2 if BYTES else 1), sent, inside, BYTES)
    if RESIDUAL:
        lost = value - widen_u16(sent, BF16)
        tl.store(residual + at, lost, mask=inside & (magnitude(lost) < 0x7F800000))


@triton.jit
def cast_decode_kernel(payload, dst, numel, BF16: tl.constexpr, ADD: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr):
    """Write the values of the payload to dst, or add them to dst in float32."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    value = widen_u16(load_u16(payload + at * (2 if BYTES else 1), inside, BYTES), BF16)
    store_value(dst + at, value, inside, ADD)


def cast_encode(src: Tensor, residual: State, wire: torch.dtype, payload: Tensor) -> None:
    numel = src.numel()
    check_flat(src, numel, [residual])
    check_payload(payload, 2 * numel)
    words, constants = _wire(payload, wire)
    launch(
        cast_encode_kernel, triton.cdiv(numel, TILE), src, residual, words, numel, RESIDUAL=residual is not None, **constants,
    )  # fmt: skip


def cast_decode(payload: Tensor, wire: torch.dtype, add: bool, dst: Tensor) -> None:
    numel = dst.numel()
    check_flat(dst, numel)
    check_payload(payload, 2 * numel)
    words, constants = _wire(payload, wire)
    launch(cast_decode_kernel, triton.cdiv(numel, TILE), words, dst, numel, ADD=add, **constants)


def _wire(payload: Tensor, wire: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """The payload as the kernels take it, with what they are compiled for. A payload may begin at an odd byte."""
    odd = bool(payload.data_ptr() % 2)
    words = payload if odd else payload.view(torch.int16)
    return words, {"BF16": wire == torch.bfloat16, "BYTES": odd, "TILE": TILE}
