"""Adam's second moment where ranks train alone: that of the mean gradient, estimated from a rank's own gradients.

Adam divides its steps by the root of its second moment, a moving mean of g * g. A gradient g is a signal, which all ranks have in
common, and a rank's own noise: the mean of g * g is s + e, with the squares s of the signal and e of the noise. The mean
gradient of n ranks has s + e / n. So where noise is most of g, a rank that trains alone makes steps up to sqrt(n) times shorter
than synchronous training does.

Nothing is sent for the estimate. Adam's first moment m, a moving mean of g, has less of the noise: the mean of m * m is s + c e,
with c = (1 - beta1) / (1 + beta1). So (m * m - c * g * g) / (1 - c) is s on average. Where it is below 0 it is taken for 0, so
steps are rather too short than too long. In the first steps m is mostly g, and noise counts as signal.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradwire.kernels import Noise
from gradwire.kernels import lower_second_moments as lower

__all__ = ["lower_second_moments"]

_KINDS = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam
"""Optimizers, and those derived from them, that keep moving means of g and of g * g as Adam does."""
_KEYS = "step", "exp_avg", "exp_avg_sq"
_TOGETHER = 1 << 24
"""Elements of the tensors that are worked on together, unless one has more: more need memory, fewer need more launches."""


@torch.no_grad()
def lower_second_moments(optimizer: torch.optim.Optimizer, ranks: int, averaged: Iterable[torch.Tensor]) -> None:
    """Take the noise that a mean over so many ranks would not have out of what the last step added to the second moments.

    averaged: the parameters that ranks average. The optimizer may step others, too, such as those of another model.
    Called after a step, while its gradients are there. Needs memory for two copies of 16 million elements, or of the largest
    tensor. Does nothing for optimizers other than Adam and its kin, for a beta1 of 0, where gradients are not finite, and where a
    gradient scaler left out the step.
    """
    if ranks < 2 or not isinstance(optimizer, _KINDS):
        return
    overflows = getattr(optimizer, "found_inf", None)  # a scaler leaves it to fused optimizers to do nothing
    if overflows is not None and overflows.device.type == "cpu":
        if overflows:
            return
        overflows = None
    chosen = {id(each) for each in averaged}
    for group in optimizer.param_groups:
        first_kept, second_kept = map(float, group["betas"])
        noise = Noise(first_kept, second_kept, ranks)
        mine = [each for each in group["params"] if id(each) in chosen]
        for same in _alike(optimizer, mine) if first_kept else ():  # else the first moment is the gradient
            steps, first, second = ([_held(optimizer.state[each][key]) for each in same] for key in _KEYS)
            lower(second, first, [_held(each.grad) for each in same], steps, noise, overflows)


def _alike(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters that have just been stepped, some of a device and dtype together."""
    found: dict[Any, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None and not each.is_complex() and all(key in optimizer.state[each] for key in _KEYS):
            found.setdefault((each.grad.device, each.grad.dtype), []).append(each)
    for same in found.values():
        together, numel = [same[0]], same[0].numel()
        for each in same[1:]:
            numel += each.numel()
            if numel > _TOGETHER:
                yield together
                together, numel = [], each.numel()
            together.append(each)
        yield together


def _held(tensor: Any) -> torch.Tensor:
    """The tensor, or of a DTensor the part that this rank holds."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else torch.as_tensor(tensor)
    return held
