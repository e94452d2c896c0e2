"""A model whose layers are works of a sleeping accelerator, of given times: for `benchmarks offload` and its tests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.sleeping import SleepingAccelerator


class LayerTimes(NamedTuple):
    """The times of a layer of one tensor."""

    numel: int
    forward_us: float
    backward_us: float


class SleepingModel(nn.Module):
    """Layers with a forward and a backward that are works of a sleeping accelerator.

    The gradient of a layer is its weight minus the input, a number, times the layer's own target.
    """

    def __init__(self, accelerator: SleepingAccelerator, layers: Sequence[LayerTimes], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.accelerator, self.layers = accelerator, tuple(layers)
        self.weights = nn.ParameterList(torch.zeros(layer.numel) for layer in layers)
        self.targets = [torch.randn(layer.numel, generator=generator) for layer in layers]

    def forward(self, value: Tensor) -> Tensor:
        """value: a tensor of one element."""
        carried = value.clone().requires_grad_()
        for weight, target, layer in zip(self.weights, self.targets, self.layers, strict=True):
            carried = _Layer.apply(carried, weight, _LayerWork(self.accelerator, layer, target, float(value)))
        return carried.sum()


class _LayerWork(NamedTuple):
    accelerator: SleepingAccelerator
    layer: LayerTimes
    target: Tensor
    value: float


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: Tensor, weight: Tensor, given: _LayerWork) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.given = given
        return given.accelerator.compute(given.layer.forward_us, carried.clone)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,), given = ctx.saved_tensors, ctx.given
        gradient = given.accelerator.compute(given.layer.backward_us, lambda: torch.sub(weight, given.target, alpha=given.value))
        return grads[0], gradient, None
