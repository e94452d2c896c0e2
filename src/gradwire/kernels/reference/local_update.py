"""The local update: a step of a rank's weights along the rank's own gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import narrow
from gradwire.kernels.segments import State


class LocalUpdate(NamedTuple):
    """The coefficients of a local update:

        out = weight - rate * (own * gradient + momentum * mean) / (sqrt(kept * squares + taken * gradient^2) + eps)

    Without squares there is no division, and without a mean there is no term of the mean.
    """

    rate: float
    own: float = 1.0
    momentum: float = 0.0
    kept: float = 0.0
    taken: float = 0.0
    eps: float = 0.0


def local_update(weight: Tensor, gradient: Tensor, squares: State, mean: State, by: LocalUpdate, out: Tensor) -> None:
    """Write the weights moved by `by` to `out`. All tensors have one shape. The result is computed in float32, or in float64 for
    float64 weights, and rounded once."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    g = gradient.to(wide)
    along = g * by.own
    if mean is not None:
        along = along + mean.to(wide) * by.momentum
    along = along * by.rate
    if squares is not None:
        estimate = squares.to(wide) * by.kept + g * g * by.taken
        along = along / (estimate.to(torch.float64).sqrt().to(wide) + by.eps)  # torch's own square root of float32 is not exact
    out.copy_(narrow(weight.to(wide) - along, out.dtype))
