"""The outer optimizer of the `local` schedule: it steps the global weights, by name."""

from collections.abc import Mapping

import torch

from gradwire.core import Nesterov, printable
from gradwire.engine.torch_hooks.stepped import own_steps

_BUFFER = "momentum_buffer"
"""The key under which torch's SGD keeps momentum."""


class OuterOptimizer:
    """Torch's SGD over tensors that are no parameters of the model."""

    def __init__(self, data: Nesterov, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = dict(weights)
        self._sgd = torch.optim.SGD(
            list(self._weights.values()), lr=data.lr, momentum=data.momentum, nesterov=data.momentum > 0
        )

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Step these weights, in place."""
        chosen = [self._weights[name] for name in gradients]
        for weight, gradient in zip(chosen, gradients.values(), strict=True):
            weight.grad = gradient
        with own_steps():
            self._sgd.step()
        for weight in chosen:
            weight.grad = None

    @property
    def momenta(self) -> dict[str, torch.Tensor]:
        """The momentum of each weight that has been stepped."""
        kept = {name: self._sgd.state[weight].get(_BUFFER) for name, weight in self._weights.items()}
        return {name: value for name, value in kept.items() if value is not None}

    def check(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for momenta that are not of these weights."""
        for name, value in momenta.items():
            expected = self._weights.get(name)
            if expected is None or (value.numel(), value.dtype) != (expected.numel(), expected.dtype):
                kind = "no such tensor" if expected is None else f"{expected.numel()} elements of {expected.dtype}"
                raise ValueError(
                    f"the state has the outer momentum of {printable(name)}, {value.numel()} elements of {value.dtype}, and the "
                    f"model has {kind}. Pass what handle.state_dict() returned."
                )

    def take(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Go on with copies of these momenta; weights whose momentum is not here, or of another size, begin without."""
        for name, weight in self._weights.items():
            value = momenta.get(name)
            self._sgd.state[weight].pop(_BUFFER, None)
            if value is not None and value.numel() == weight.numel():
                self._sgd.state[weight][_BUFFER] = torch.empty_like(weight).copy_(value.reshape(weight.shape))
