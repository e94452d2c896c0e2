"""Jobs of the bench whose computation is a timed sleep, so that many nodes fit on few cores.

Parameters, gradients, codecs, memory and sockets are real. Gradients become ready in the order and at the times of a device of
`GFLOPS`. The optimizer sleeps too, so weights stay nearly as they are, and the loss means nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradwire.bench.jobs import Batch, Job

GFLOPS = 50.0
"""The made-up speed of the device, in 1e9 operations a second. The transformer's step then takes about 0.2 s."""
OPTIMIZER_US_PER_ELEMENT = 1e-4
_RATE = 1e-6

T = TypeVar("T")


class SleepingJob(Job):
    """A job with the same parameters, names and batch size, and with computation that sleeps.

    Each element of a parameter costs 2 operations in forward and 4 in backward, for each image or character of the batch.
    Embeddings cost none.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.seed)
        self.name, self.batch_size, self._job = job.name, job.batch_size, job
        samples = job.batch_size * getattr(job, "context", 1)
        self._forward_us_per_element = 2 * samples / GFLOPS / 1e3

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _SleepingOptimizer(model.parameters())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0])
        return loss

    def _model(self) -> nn.Module:
        return _SleepingNet(self._job._model(), self._forward_us_per_element)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        value = torch.rand(1, generator=generator)
        return value, value


class _SleepingNet(nn.Module):
    """The parameters of another model, by the same names, in layers that sleep one after another."""

    def __init__(self, like: nn.Module, us_per_element: float) -> None:
        super().__init__()
        layers = []
        for path, module in like.named_modules():
            if own := dict(module.named_parameters(recurse=False)):
                layer = _SleepingLayer(own, 0.0 if isinstance(module, nn.Embedding) else us_per_element)
                _place(self, path, layer)
                layers.append(layer)
        self.__dict__["_in_order"] = layers  # they are registered by their names already

    def forward(self, value: Tensor) -> Tensor:
        carried = value.clone().requires_grad_()
        for layer in self.__dict__["_in_order"]:
            carried = layer(carried)
        return carried.sum()


class _SleepingLayer(nn.Module):
    def __init__(self, parameters: dict[str, nn.Parameter], us_per_element: float) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))
        numel = sum(parameter.numel() for parameter in parameters.values())
        self.forward_us = numel * us_per_element

    def forward(self, carried: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(carried, self.forward_us, *self.parameters(recurse=False))
        return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: Tensor, forward_us: float, *parameters: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.detach()  # a use: values that are still to come are waited for
        ctx.save_for_backward(carried, *parameters)
        ctx.us = 2 * forward_us
        return _slept(forward_us, carried.clone)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        carried, *parameters = ctx.saved_tensors

        def gradients() -> Sequence[Tensor]:
            return [parameter * carried for parameter in parameters]

        return grads[0], None, *_slept(ctx.us, gradients)


class _SleepingOptimizer(torch.optim.SGD):
    """Sleeps, and steps the first element of each parameter. An optimizer that moves nothing counts as one whose steps cannot be
    made layer by layer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, gradient in pairs:
            parameter.view(-1)[:1].sub_(gradient.reshape(-1)[:1], alpha=_RATE)
        time.sleep(sum(parameter.numel() for parameter, _ in pairs) * OPTIMIZER_US_PER_ELEMENT / 1e6)


def _slept(us: float, work: Callable[[], T]) -> T:
    """The result of this work, after at least so many microseconds."""
    began = time.perf_counter()
    result = work()
    time.sleep(max(0.0, began + us / 1e6 - time.perf_counter()))
    return result


def _place(root: nn.Module, path: str, layer: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(name, layer)
