"""Energies and weights of elements. A program has up to 4096 elements of a tensor."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import Segments
from gradwire.kernels.triton.launch import blocks_each, check_flat, check_weights, launch, program, programs_of
from gradwire.kernels.triton.numbers import widen
from gradwire.kernels.triton.sums import LANES, folded

MOST, LEAST_SQUARE, LEAST_ENERGY = tl.constexpr(2.0**100), tl.constexpr(2.0**-110), tl.constexpr(2.0**-100)
RUN = 1024
"""Elements of a block where a kernel sees each element alone."""


@triton.jit
def learn_energy_kernel(mean, table, energy, kept, taken, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """One row of the table of programs."""
    first, numel, _, _, _, _, _, _ = program(table, ALIGNED)
    for at in range(0, numel, BLOCK):
        j = at + tl.arange(0, BLOCK)
        inside = j < numel
        value, old = widen(tl.load(mean + first + j, mask=inside, other=0.0)), tl.load(energy + first + j, mask=inside, other=0.0)
        square = value * value
        new = kept * old + taken * tl.where(square >= LEAST_SQUARE, square, 0.0)
        new = tl.where(new >= LEAST_ENERGY, new, 0.0)
        tl.store(energy + first + j, tl.where(square < MOST, new, old), mask=inside)


@triton.jit
def root_of(square):
    """The exponent of the power of two that is nearest to a square root, plus 64."""
    return ((square.to(tl.int32, bitcast=True) >> 23) + 2) >> 1


@triton.jit
def weigh_elements_kernel(
    energy, table, weights, FLOOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """One row of the table of programs."""
    first, numel, _, _, _, _, _, _ = program(table, ALIGNED)
    n = tl.minimum(numel, BLOCK)
    lane, block = tl.arange(0, LANES)[None, :], tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, LANES], tl.float32)
    for at in range(0, n, LANES):
        j = block * BLOCK + at + lane
        total += tl.load(energy + first + j, mask=(at + lane < n) & (j < numel), other=0.0)
    mean = folded(total, ROWS) / n
    least = (mean * tl.full([ROWS], FLOOR, tl.float64)).to(tl.float32)
    base = 127 - root_of(mean.to(tl.float32) + least)
    for at in range(0, n, LANES):
        j = block * BLOCK + at + lane
        inside = (at + lane < n) & (j < numel)
        found = base[:, None] + root_of(tl.load(energy + first + j, mask=inside, other=0.0) + least[:, None])
        tl.store(weights + first + j, tl.where((mean > 0)[:, None], found, 127).to(tl.uint8), mask=inside)


def learn_energy(mean: Tensor, segments: Segments, keep: float, energy: Tensor) -> None:
    programs = programs_of(segments, 32, 1, 2)
    check_flat(mean, programs.numel, [energy])
    launch(
        learn_energy_kernel, len(programs.table), mean, programs.table, energy, float(keep), 1.0 - float(keep),
        BLOCK=RUN, ALIGNED=programs.aligned,
    )  # fmt: skip


def weigh_elements(energy: Tensor, segments: Segments, block: int, floor: float, weights: Tensor) -> None:
    programs = programs_of(segments, block, 1, 2)
    check_flat(energy, programs.numel, [energy])
    check_weights(weights, energy)
    launch(
        weigh_elements_kernel, len(programs.table), energy, programs.table, weights, FLOOR=float(floor),
        ROWS=blocks_each(block), BLOCK=block, ALIGNED=programs.aligned,
    )  # fmt: skip
