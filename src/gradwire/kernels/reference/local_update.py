"""A rank's own step of weights, by its own gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import narrow
from gradwire.kernels.segments import State


class LocalUpdate(NamedTuple):
    """out = weight - rate * (own * gradient + momentum * mean) / (sqrt(kept * squares + taken * gradient^2) + eps). Without
    squares there is no division, and without a mean there is no term of the mean."""

    rate: float
    own: float = 1.0
    momentum: float = 0.0
    kept: float = 0.0
    taken: float = 0.0
    eps: float = 0.0


def local_update(weight: Tensor, gradient: Tensor, squares: State, mean: State, by: LocalUpdate, out: Tensor) -> None:
    """Write the weights moved by `by` to `out`, in float32 (or float64, if they are) and rounded once. All have one shape."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    g = gradient.to(wide)
    along = g * by.own
    if mean is not None:
        along = along + mean.to(wide) * by.momentum
    along = along * by.rate
    if squares is not None:
        estimate = squares.to(wide) * by.kept + g * g * by.taken
        along = along / (estimate.to(torch.float64).sqrt().to(wide) + by.eps)  # torch's own of float32 is not exact
    out.copy_(narrow(weight.to(wide) - along, out.dtype))
