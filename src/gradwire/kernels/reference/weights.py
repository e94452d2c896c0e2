"""Weights of elements: powers of two near the usual size of each element, relative to its block.

An encode divides an element by its weight, and a decode multiplies by the weight. So the error of an element is in proportion to
the element's own size, and a small element that shares a block with large ones does not wait for them. Division by a power of
two rounds nothing.

The energy E of an element is its mean square over the last steps, of the decoded means that all ranks have:

    E = keep * E + (1 - keep) * mean^2

The weight of an element is sqrt(E + floor * e) over sqrt(e + floor * e), e being the mean energy of the block. Both roots are
rounded to the nearest power of two, by the ratio. A weight is stored as the 8 bits of its exponent in a float32. The weights of
a block without energy are 1.

A mean whose square is not finite or 2^100 or more leaves E as it was. Squares below 2^-110 and energies below 2^-100 count as
zero, so that E does not depend on whether the processor keeps subnormal numbers.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import bits_of, equal_blocks, float_of
from gradwire.kernels.reference.signs import block_sums
from gradwire.kernels.segments import Segments

ONE = 127
"""The stored weight 1."""
MOST, LEAST_SQUARE, LEAST_ENERGY = 2.0**100, 2.0**-110, 2.0**-100


def values_of(weights: Tensor) -> Tensor:
    """The weights as float32."""
    return float_of(weights.to(torch.int64) << 23)


def learn_energy(mean: Tensor, segments: Segments, keep: float, energy: Tensor) -> None:
    """Add the squares of the mean (flat, any dtype) to the energy (float32, flat) of the same elements."""
    kept, taken = (torch.tensor(part, dtype=torch.float32, device=mean.device) for part in (keep, 1 - keep))
    for row in segments.rows:
        where = slice(row.offset, row.offset + row.numel)
        square, counted = _squares(mean[where])
        new = kept * energy[where] + taken * counted
        new = torch.where(new >= LEAST_ENERGY, new, 0.0)
        energy[where] = torch.where(square < MOST, new, energy[where])  # false for NaN too


def forget_energy(mean: Tensor, keep: float, energy: Tensor) -> None:
    """Undo `learn_energy` of the last mean (flat), but for rounding."""
    square, counted = _squares(mean)
    old = (energy - (1 - keep) * counted) / keep
    energy.copy_(torch.where(square < MOST, torch.where(old >= LEAST_ENERGY, old, 0.0), energy))


def scale_energy(energy: Tensor, factor: float) -> None:
    """Change the energies of elements that are multiplied by a factor from now on."""
    scaled = energy * factor**2
    energy.copy_(torch.where(scaled >= LEAST_ENERGY, scaled.clamp(max=MOST), 0.0))


def _squares(mean: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of a mean, and the part of them that counts."""
    square = mean.to(torch.float32).square()
    return square, torch.where(square >= LEAST_SQUARE, square, 0.0)


def weigh_elements(energy: Tensor, segments: Segments, block: int, floor: float, weights: Tensor) -> None:
    """Write the weights (uint8, flat) that follow from the energy (float32, flat) of the same elements."""
    for row in segments.rows:
        for start, count, n in equal_blocks(row.numel, block):
            where = slice(row.offset + start, row.offset + start + count * n)
            blocks = energy[where].reshape(count, n)
            mean = (block_sums(blocks) / n).unsqueeze(1)
            least = (mean * floor).to(torch.float32)
            of_block = _root(mean.to(torch.float32) + least)
            found = ONE + _root(blocks + least) - of_block
            weights[where] = torch.where(mean > 0, found, ONE).to(torch.uint8).reshape(-1)


def _root(squares: Tensor) -> Tensor:
    """The exponent of the power of two that is nearest to the square root, plus 64."""
    return (bits_of(squares) >> 23) + 2 >> 1
