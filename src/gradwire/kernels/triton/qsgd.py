"""QSGD: one launch a call, a program for up to 4096 elements of a tensor."""

from typing import Any

import torch
import triton
import triton.language as tl

from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.blocks import L2, MAX, MINMAX, decode_blocks, encode_blocks
from gradwire.kernels.triton.launch import (
    OPTIONS,
    Programs,
    blocks_each,
    check_flat,
    check_payload,
    device_of,
    program,
    programs_of,
)
from gradwire.kernels.triton.numbers import stream_key

__all__ = ["qsgd_decode", "qsgd_encode"]

_SCALES = {"max": MAX.value, "minmax": MINMAX.value, "l2": L2.value}


@triton.jit
def qsgd_encode_kernel(
    src, residual, table, stream, payload,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, padding, code, counter, tensor, bits = program(table, ALIGNED)
    key = tensor.to(tl.uint64, bitcast=True)
    if STOCHASTIC:
        key = stream_key(stream, tensor)
    src, residual, scales, codes = src + first, residual + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        encode_blocks(
            src, residual, scales, codes, blocks, BLOCK, counter, key, bits,
            ROWS, BLOCK, SCALE, STOCHASTIC, RESIDUAL, True,
        )  # fmt: skip
    else:
        blocks = 1
        encode_blocks(
            src, residual, scales, codes, blocks, numel, counter, key, bits,
            1, BLOCK, SCALE, STOCHASTIC, RESIDUAL, False,
        )  # fmt: skip
    byte = tl.arange(0, 16)
    used = blocks * (4 if SCALE == MINMAX else 2)
    tl.store(scales + used + byte, tl.zeros([16], tl.uint8), mask=byte < padding)


@triton.jit
def qsgd_decode_kernel(
    payload, table, dst,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of the table of programs."""
    first, numel, scale, _, code, _, _, bits = program(table, ALIGNED)
    dst, scales, codes = dst + first, payload + scale, payload + code
    blocks = numel // BLOCK
    if blocks > 0:
        decode_blocks(dst, scales, codes, blocks, BLOCK, bits, ROWS, BLOCK, SCALE, ADD, True)
    else:
        decode_blocks(dst, scales, codes, 1, numel, bits, 1, BLOCK, SCALE, ADD, False)


def qsgd_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: torch.Tensor,
) -> None:
    """As `reference.qsgd_encode`."""
    programs = programs_of(segments, block, scale)
    check_flat(src, programs.numel, [residual])
    check_payload(payload, programs.payload_bytes)
    if stream.numel() != 4 or stream.dtype != torch.int64 or not stream.is_contiguous():
        raise RuntimeError("the stream is four int64: seed, step, encode, rank")
    if len(programs.table):
        kept = src if residual is None else residual
        with device_of(src):
            qsgd_encode_kernel[(len(programs.table),)](
                src, kept, programs.table, stream, payload,
                STOCHASTIC=rounding == "stochastic", RESIDUAL=residual is not None, **_constants(programs, block, scale),
            )  # fmt: skip


def qsgd_decode(
    payload: torch.Tensor, segments: Segments, block: int, scale: str, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.qsgd_decode`."""
    programs = programs_of(segments, block, scale)
    check_flat(dst, programs.numel)
    check_payload(payload, programs.payload_bytes)
    if add and dst.dtype != torch.float32:
        raise RuntimeError(f"sums in float32, not in {dst.dtype}: decode to a float32 buffer to add")
    if len(programs.table):
        with device_of(dst):
            qsgd_decode_kernel[(len(programs.table),)](
                payload, programs.table, dst, ADD=add, **_constants(programs, block, scale)
            )


def _constants(programs: Programs, block: int, scale: str) -> dict[str, Any]:
    """What the kernels are compiled for."""
    warps = 8 if block > 4096 else 4
    each = {"ROWS": blocks_each(block), "BLOCK": block, "SCALE": _SCALES[scale], "ALIGNED": programs.aligned}
    return {**each, "num_warps": warps, **OPTIONS}
