"""Adam's second moment where ranks train alone: that of the mean gradient, estimated from a rank's own gradients.

Adam divides its steps by the root of its second moment, a moving mean of g * g. A gradient g is a signal, which all ranks have in
common, and a rank's own noise: the mean of g * g is s + e, with the squares s of the signal and e of the noise. The mean
gradient of n ranks has s + e / n. So where noise is most of g, a rank that trains alone makes steps up to sqrt(n) times shorter
than synchronous training does.

Nothing is sent for the estimate. Adam's first moment m, a moving mean of g, has less of the noise: the mean of m * m is s + c e,
with c = (1 - beta1) / (1 + beta1). So (m * m - c * g * g) / (1 - c) is s on average. Where it is below 0 it is taken for 0, so
steps are rather too short than too long. In the first steps m is mostly g, and noise counts as signal.
"""

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["lower_second_moments"]

_KINDS = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam
"""Optimizers, and those derived from them, that keep moving means of g and of g * g as Adam does."""
_KEYS = "step", "exp_avg", "exp_avg_sq"


@torch.no_grad()
def lower_second_moments(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Take the noise that a mean over so many ranks would not have out of what the last step added to the second moments.

    Called after a step, while its gradients are there. Needs memory for two copies of them. Does nothing for optimizers other
    than Adam and its kin, and where gradients are not finite: a gradient scaler left out that step.
    """
    if ranks < 2 or not isinstance(optimizer, _KINDS):
        return
    for group in optimizer.param_groups:
        of_gradient, of_squares = group["betas"]
        left = (1 - of_gradient) / (1 + of_gradient)  # of the noise, in the first moment
        for same in _alike(optimizer, group["params"]):
            gradients = [_held(each.grad) for each in same]
            steps, first, second = ([_held(optimizer.state[each][key]) for each in same] for key in _KEYS)
            unbiased = (1 / (1 - of_gradient ** torch.stack(steps))).unbind()
            squares, signals = torch._foreach_mul(gradients, gradients), torch._foreach_mul(first, unbiased)
            torch._foreach_mul_(signals, signals)
            torch._foreach_sub_(signals, squares, alpha=left)
            torch._foreach_div_(signals, 1 - left)
            torch._foreach_clamp_min_(signals, 0.0)
            torch._foreach_sub_(squares, signals)
            for noise in squares:
                noise.nan_to_num_(0.0, 0.0, 0.0)
            torch._foreach_sub_(second, squares, alpha=(1 - of_squares) * (1 - 1 / ranks))
            torch._foreach_clamp_min_(second, 0.0)  # rounding, and weight decay that the optimizer added to gradients


def _alike(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """The parameters that have just been stepped, those of a device and dtype together."""
    found: dict[Any, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None and not each.is_complex() and all(key in optimizer.state[each] for key in _KEYS):
            found.setdefault((each.grad.device, each.grad.dtype), []).append(each)
    return found.values()


def _held(tensor: Any) -> torch.Tensor:
    """The tensor, or of a DTensor the part that this rank holds."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else torch.as_tensor(tensor)
    return held
