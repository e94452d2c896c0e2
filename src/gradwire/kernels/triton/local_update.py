"""A rank's own step of weights, by its own gradient."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.segments import State
from gradwire.kernels.triton.launch import check_flat, launch
from gradwire.kernels.triton.numbers import narrow, widen

TILE = 1024
"""Elements of a program."""


@triton.jit
def local_update_kernel(
    weight, gradient, squares, mean, out, numel, rate, own, momentum, kept, taken, eps,
    SQUARES: tl.constexpr, MEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`reference.local_update` for one tile."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    g = widen(tl.load(gradient + at, mask=inside, other=0.0))
    along = g * own
    if MEAN:
        along += widen(tl.load(mean + at, mask=inside, other=0.0)) * momentum
    along *= rate
    if SQUARES:
        estimate = widen(tl.load(squares + at, mask=inside, other=1.0)) * kept
        along = tl.div_rn(along, tl.sqrt_rn(estimate + g * g * taken) + eps)
    moved = widen(tl.load(weight + at, mask=inside, other=0.0)) - along
    tl.store(out + at, narrow(moved, out.dtype.element_ty), mask=inside)


def local_update(weight: Tensor, gradient: Tensor, squares: State, mean: State, by: LocalUpdate, out: Tensor) -> None:
    numel = weight.numel()
    for each in [tensor for tensor in (weight, gradient, squares, mean, out) if tensor is not None]:
        check_flat(each, numel)
        if each.dtype != weight.dtype or each.numel() != numel:
            raise RuntimeError("gradient, moments and result must be contiguous, of the weight's dtype and as long as it")
    if numel:
        launch(
            local_update_kernel, triton.cdiv(numel, TILE), weight, gradient, squares, mean, out, numel, *map(float, by),
            SQUARES=squares is not None, MEAN=mean is not None, TILE=TILE,
        )  # fmt: skip
