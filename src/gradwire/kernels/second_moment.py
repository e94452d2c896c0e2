"""Second moments of Adam without the noise that a mean over ranks would not have: in C++ on CPUs, else in torch."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core import native
from gradwire.kernels import cpu

__all__ = ["Noise", "lower_second_moments"]


class Noise(NamedTuple):
    """The noise in a rank's gradients, as far as the optimizer and the number of ranks say."""

    first: float
    second: float
    """How much of the first and the second moment a step of the optimizer keeps: beta1, above 0, and beta2."""
    ranks: int
    """How many ranks' gradients the mean is of."""

    @property
    def left(self) -> float:
        """The part of the gradient's noise, as squares, that the first moment has in the long run."""
        return (1 - self.first) / (1 + self.first)

    @property
    def taken(self) -> float:
        """The part of the noise in one squared gradient that goes out of the second moment."""
        return (1 - self.second) * (1 - 1 / self.ranks)


class _Lower(ctypes.Structure):
    """Twin of `Lower` in csrc/api_weights.cpp."""

    _fields_ = (*((name, c_float) for name in ("unbiased", "left", "whole", "taken")), ("threads", c_int64))


def lower_second_moments(
    second: Sequence[Tensor],
    first: Sequence[Tensor],
    gradients: Sequence[Tensor],
    steps: Sequence[Tensor],
    noise: Noise,
    overflows: Tensor | None = None,
) -> None:
    """Take the noise out of what the last step added to the second moments: of

        signal = max(0, ((first / (1 - beta1 ** steps)) ** 2 - left * gradient ** 2) / (1 - left))
        second = second - taken * (gradient ** 2 - signal)

    Elements whose gradient is not finite stay. All tensors have the dtype and the device of the first, but for the steps, which
    are numbers. In torch this needs memory for two copies of the tensors. overflows: a number on their device, above 0 if the
    step was left out: then nothing changes, and nothing waits for the device.
    """
    columns = list(zip(second, first, gradients, steps, strict=True))
    if overflows is None and gradients[0].device.type == "cpu" and cpu.available() is None:
        columns = [each for each in columns if not _lowered_by_cpp(*each, noise)]
    if columns:
        _lowered_by_torch(*([*each] for each in zip(*columns, strict=True)), noise=noise, overflows=overflows)


def _lowered_by_torch(
    second: list[Tensor],
    first: list[Tensor],
    gradients: list[Tensor],
    steps: list[Tensor],
    *,
    noise: Noise,
    overflows: Tensor | None,
) -> None:
    unbiased = (1 / (1 - noise.first ** torch.stack(steps))).unbind()
    squares, signals = torch._foreach_mul(gradients, gradients), torch._foreach_mul(first, unbiased)
    torch._foreach_mul_(signals, signals)
    torch._foreach_sub_(signals, squares, alpha=noise.left)
    torch._foreach_div_(signals, 1 - noise.left)
    torch._foreach_clamp_min_(signals, 0.0)
    torch._foreach_sub_(squares, signals)
    for each in squares:
        each.nan_to_num_(0.0, 0.0, 0.0)
    if overflows is not None:
        torch._foreach_mul_(squares, (overflows == 0).to(squares[0]).reshape(()))
    torch._foreach_sub_(second, squares, alpha=noise.taken)
    torch._foreach_clamp_min_(second, 0.0)  # rounding, and weight decay that the optimizer added to gradients


def _lowered_by_cpp(second: Tensor, first: Tensor, gradient: Tensor, steps: Tensor, noise: Noise) -> bool:
    """Do it in one pass over memory, where all tensors have the same dense layout and a dtype that C++ knows. Whether it did."""
    if not steps:  # a gradient scaler left out the first one
        return True
    if (elements := cpu.in_memory(second, first, gradient)) is None:
        return False
    by = _Lower(1 / (1 - noise.first ** float(steps)), noise.left, 1 / (1 - noise.left), noise.taken, torch.get_num_threads())
    _native()(*elements, byref(by))
    return True


@functools.cache
def _native() -> Callable[..., None]:
    return cpu.bind(native.library(), "lower_second_moment", *[cpu.Tensor] * 3, ctypes.POINTER(_Lower))
