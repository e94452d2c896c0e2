"""Selection of the largest elements of each group. Four passes find the smallest sent magnitude: each pass counts the next bits
of the magnitudes. Two more passes find the places. A pass is one launch for all groups, and a program handles up to 4096
elements. Nothing as large as the gradient is kept between passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.segments import State
from gradwire.kernels.triton.indices import Groups
from gradwire.kernels.triton.launch import ELEMENTS, launch
from gradwire.kernels.triton.numbers import magnitude, narrow, one_nan, widen

NAN_KEY = tl.constexpr(0x7F800001)
"""All NaN count as one magnitude above Inf."""
BINS = tl.constexpr(256)
PASSES = ((23, 8), (15, 8), (7, 8), (0, 7))
"""Lowest bit, and number of bits, that each pass counts."""


@triton.jit
def key_of(value):
    """Magnitudes as int32, in their order."""
    return tl.minimum(magnitude(value), NAN_KEY)


@triton.jit
def load_given(
    src, residual, momentum, factors, decay, at, inside, group,
    RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """(what is selected from, the velocity in it): src, clipped, with what is remembered."""
    velocity = widen(tl.load(src + at, mask=inside, other=0.0))
    if CLIP:
        velocity *= tl.load(factors + group)
    if MOMENTUM:
        velocity = tl.load(momentum + at, mask=inside, other=0.0) * decay + velocity
    value = velocity
    if RESIDUAL:
        value = tl.load(residual + at, mask=inside, other=0.0) + velocity
    return value, velocity


@triton.jit
def element_program(table):
    """(first element in the flat buffer, elements, group, place of the first in the group) of this program."""
    row = table + tl.program_id(0) * 4
    return tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def count_digits_kernel(
    src, residual, momentum, factors, decay, table, least, histogram, shift, bits,
    TILE: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """How many elements whose magnitudes begin as `least` of their group have each number in the next bits."""
    first, numel, group, _ = element_program(table)
    i = tl.arange(0, TILE)
    value, _ = load_given(src, residual, momentum, factors, decay, first + i, i < numel, group, RESIDUAL, MOMENTUM, CLIP)
    key, above = key_of(value), shift + bits
    matches = (i < numel) & ((key >> above) == (tl.load(least + group) >> above))
    counts = tl.histogram((key >> shift) & ((1 << bits) - 1), BINS, mask=matches)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + group * BINS + bins, counts, mask=counts > 0)


@triton.jit
def pick_digit_kernel(histogram, least, need, shift):
    """The next bits of a group's smallest magnitude that is sent, and how many are needed of those that have them."""
    group, bins = tl.program_id(0), tl.arange(0, BINS)
    counts = tl.load(histogram + group * BINS + bins)
    wanted = tl.load(need + group)
    at_least = tl.sum(counts) - tl.cumsum(counts) + counts
    digit = tl.sum((at_least >= wanted).to(tl.int32)) - 1
    larger = tl.sum(tl.where(bins > digit, counts, 0))
    tl.store(need + group, wanted - larger)
    tl.store(least + group, tl.load(least + group) | (digit << shift))
    tl.store(histogram + group * BINS + bins, tl.zeros([BINS], tl.int32))


@triton.jit
def count_chosen_kernel(
    src, residual, momentum, factors, decay, table, least, larger, equal,
    TILE: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """How many elements of each program are above the smallest magnitude that is sent, and how many are equal to it."""
    first, numel, group, _ = element_program(table)
    i = tl.arange(0, TILE)
    value, _ = load_given(src, residual, momentum, factors, decay, first + i, i < numel, group, RESIDUAL, MOMENTUM, CLIP)
    key, last = tl.where(i < numel, key_of(value), -1), tl.load(least + group)
    tl.store(larger + tl.program_id(0), tl.sum((key > last).to(tl.int64)))
    tl.store(equal + tl.program_id(0), tl.sum((key == last).to(tl.int64)))


@triton.jit
def send_kernel(
    src, residual, momentum, factors, decay, table, group_table, least, take, base, floor, values, indices, ones,
    TILE: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """The values and places of what is sent, the ones of their rows of bits, and what is remembered afterwards.

    take: how many of the equal ones a program sends, its first; base: how many elements are sent before it. Values below
    `floor` are sent as zeros.
    """
    first, numel, group, before = element_program(table)
    i = tl.arange(0, TILE)
    inside, at = i < numel, first + i
    value, velocity = load_given(src, residual, momentum, factors, decay, at, inside, group, RESIDUAL, MOMENTUM, CLIP)
    key, last = tl.where(inside, key_of(value), -1), tl.load(least + group)
    equal = key == last
    chosen = (key > last) | (equal & (tl.cumsum(equal.to(tl.int32)) <= tl.load(take + tl.program_id(0))))
    place = tl.load(base + tl.program_id(0)) + tl.cumsum(chosen.to(tl.int32)) - 1
    kept = one_nan(tl.where(tl.abs(value) < floor, 0.0, value))
    sent = narrow(kept, src.dtype.element_ty)
    tl.store(values + place, sent, mask=chosen)

    row = group_table + group * 4
    first_value, low, first_one = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    index = before + i
    tl.store(indices + place, index, mask=chosen)
    one = tl.where(low < 0, index, (index >> tl.maximum(low, 0)) + place - first_value)
    tl.store(ones + first_one + one, tl.full([TILE], 1, tl.uint8), mask=chosen)

    if RESIDUAL:
        carried = inside & (magnitude(widen(narrow(value, src.dtype.element_ty))) < 0x7F800000)
        tl.store(residual + at, tl.where(chosen, value - widen(sent), value), mask=carried)
        if MOMENTUM:
            tl.store(momentum + at, tl.where(chosen, 0.0, velocity), mask=carried)


class Given:
    """The values to select from, as the kernels take them."""

    def __init__(
        self, src: Tensor, residual: State, momentum: State = None, decay: float = 0.0, factors: Tensor | None = None
    ) -> None:
        self.src, self.arguments = src, (src, residual, momentum, factors, decay)
        self.constants = {"RESIDUAL": residual is not None, "MOMENTUM": momentum is not None, "CLIP": factors is not None}


def select(given: Given, groups: Groups) -> tuple[Tensor, Tensor]:
    """For each group, the smallest magnitude that is sent, as its bits, and how many that are equal to it are sent; int32."""
    device, count = given.src.device, len(groups.table)
    least, need = torch.zeros(count, dtype=torch.int32, device=device), groups.kept.clone()
    histogram = torch.zeros(count * BINS.value, dtype=torch.int32, device=device)
    for shift, bits in PASSES:
        launch(
            count_digits_kernel, len(groups.programs), *given.arguments, groups.programs, least, histogram, shift, bits,
            TILE=ELEMENTS, num_warps=8, **given.constants,
        )  # fmt: skip
        launch(pick_digit_kernel, count, histogram, least, need, shift, num_warps=1)
    return least, need


def chosen_counts(given: Given, groups: Groups, least: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """For each program, how many equal elements it sends, and how many elements are sent before it; int64."""
    larger, equal = torch.empty(2, len(groups.programs), dtype=torch.int64, device=given.src.device)
    launch(
        count_chosen_kernel, len(groups.programs), *given.arguments, groups.programs, least, larger, equal,
        TILE=ELEMENTS, num_warps=8, **given.constants,
    )  # fmt: skip
    before = equal.cumsum(0) - equal
    left = need[groups.of_program] - (before - before[groups.first_program])
    take = left.clamp(min=0).minimum(equal)
    sent = larger + take
    return take, sent.cumsum(0) - sent
