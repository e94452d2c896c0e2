"""Ways of other systems to average gradients, rebuilt by the ideas of their papers, for comparisons of losses and bytes.

A form that begins with the name of a rival (`benchmarks.accuracy.forms`) has that rival's means in place of an exchange's.
PyTorch's PowerSGD hook has its like in `gw.PowerSGD`, whose forms are specs.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradwire.core import ElementRun

if TYPE_CHECKING:
    from benchmarks.accuracy.training import Training

__all__ = ["RIVALS", "Rival"]

Gradients = Sequence[dict[str, Tensor]]
"""The gradients of each rank by name."""
BLOCK = 128
RANKS = 4
"""The ranks for which the bytes of a system that gathers are counted."""


class Rival(Protocol):
    """A way to average."""

    def means(self, number: int, gradients: Gradients) -> dict[str, Tensor]:
        """Return what the optimizer gets in this step."""
        ...


def mean_of(gradients: Gradients, name: str) -> Tensor:
    """The exact mean of a tensor over ranks."""
    return torch.stack([each[name] for each in gradients]).mean(0)


class LoCo:
    """LoCo (Xie et al. 2024): 4 bits, and an error that is a moving average and is forgotten every so many steps.

    The sum is exact: LoCo gathers weights, not gradients. Errors are float32 here, 8 bits in the paper. Scales are those of
    blocks, since one scale for the whole model is a setting that has to be found for each. `keep` and `forget_steps` were not
    tuned.
    """

    keep, forget_steps, levels = 0.8, 512, 7

    def __init__(self, training: "Training") -> None:
        self._encoded = set(training.encoded)
        self._errors: list[dict[str, Tensor]] = [{} for _ in training.exchanges]

    def means(self, number: int, gradients: Gradients) -> dict[str, Tensor]:
        sent: list[dict[str, Tensor]] = []
        for errors, own in zip(self._errors, gradients, strict=True):
            if number % self.forget_steps == 0:
                errors.clear()
            sent.append({name: self._sent(errors, name, value) for name, value in own.items()})
        return {name: mean_of(sent, name) for name in gradients[0]}

    def _sent(self, errors: dict[str, Tensor], name: str, gradient: Tensor) -> Tensor:
        if name not in self._encoded:
            return gradient
        before = errors.get(name, torch.zeros_like(gradient))
        decoded = self._rounded(gradient + before)
        errors[name] = self.keep * before + (1 - self.keep) * (gradient + before - decoded)
        return decoded

    def _rounded(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30) / self.levels
        return ((blocks / scale).round() * scale).view(-1)[: len(flat)].view_as(values)


class FrozenAdam(torch.optim.Optimizer):
    """Adam whose second moments no longer change, and whose gradients are averaged first moments."""

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        super().__init__([{**group, "params": [*group["params"]]} for group in adam.param_groups], {})
        for group in self.param_groups:
            for parameter in group["params"]:
                before = adam.state[parameter]
                unbiased = before["exp_avg_sq"] / (1 - group["betas"][1] ** float(before["step"]))
                self.state[parameter]["scale"] = unbiased.sqrt_().add_(group["eps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(parameter.grad, self.state[parameter]["scale"], value=-group["lr"])


class OneBitAdam:
    """One-bit Adam (Tang et al. 2021): exact means first; then second moments are frozen, and first moments travel as signs.

    Both encodes have error feedback: that of each rank, and that of the mean. A tensor has one scale.
    """

    exact_part = 0.25
    """The part of the steps whose means are exact."""

    def __init__(self, training: "Training") -> None:
        self._training, self._encoded = training, set(training.encoded)
        self._moments: dict[str, Tensor] = {}
        self._errors: list[dict[str, Tensor]] = [{} for _ in training.exchanges]
        self._error_of_mean: dict[str, Tensor] = {}

    def means(self, number: int, gradients: Gradients) -> dict[str, Tensor]:
        training = self._training
        if number < self.exact_part * training.steps:
            return {name: mean_of(gradients, name) for name in gradients[0]}
        if not self._moments:
            adam = training.optimizer
            self._moments = {name: adam.state[parameter]["exp_avg"].clone() for name, parameter in training.parameters.items()}
            training.optimizer = FrozenAdam(adam)
        keep = training.optimizer.param_groups[0]["betas"][0]
        for name, before in self._moments.items():
            own = [keep * before + (1 - keep) * each[name] for each in gradients]
            if name in self._encoded:
                own = [signs_of(value, errors, name) for value, errors in zip(own, self._errors, strict=True)]
                self._moments[name] = signs_of(torch.stack(own).mean(0), self._error_of_mean, name)
            else:
                self._moments[name] = torch.stack(own).mean(0)
        return {name: moment.clone() for name, moment in self._moments.items()}


def signs_of(values: Tensor, errors: dict[str, Tensor], name: str) -> Tensor:
    """Add the error of the last step, and return the signs times the mean size. Keeps the error of this step."""
    values = values + errors[name] if name in errors else values
    decoded = values.abs().mean() * torch.where(values < 0, -1.0, 1.0)
    errors[name] = values - decoded
    return decoded


class SignDescent(torch.optim.Optimizer):
    """Steps of one size in the direction of the gradient's signs, at another optimizer's rates and weight decay."""

    def __init__(self, of: torch.optim.Optimizer) -> None:
        super().__init__([{**group, "params": [*group["params"]]} for group in of.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class DeMo:
    """DeMo (Peng et al. 2024): each rank sends the largest cosine components of its momentum, and takes them out of it.

    The optimizer is DeMo's, which steps by signs, with the job's rates. Vectors travel whole. Momentum fades by 0.999 a step, and
    tiles have at most 64 x 64 elements, as in the paper. Values have 4 bytes and places 2.
    """

    fade, edge = 0.999, 64

    def __init__(self, training: "Training", components: int) -> None:
        training.optimizer = SignDescent(training.optimizer)
        self._encoded, self._components = set(training.encoded), components
        self._momenta: list[dict[str, Tensor]] = [{} for _ in training.exchanges]

    def means(self, number: int, gradients: Gradients) -> dict[str, Tensor]:
        sent: list[dict[str, Tensor]] = []
        for momenta, own in zip(self._momenta, gradients, strict=True):
            for name in self._encoded:
                momenta[name] = self.fade * momenta[name] + own[name] if name in momenta else own[name].clone()
            sent.append(own | {name: self._taken(momentum) for name, momentum in momenta.items()})
        return {name: mean_of(sent, name) for name in gradients[0]}

    def _taken(self, momentum: Tensor) -> Tensor:
        """Take the largest components of every tile out of a momentum, and return them as a tensor of its shape."""
        matrix = momentum.view(momentum.shape[0], -1)
        (across, rows), (along, columns) = (tiles_of(size, self.edge) for size in matrix.shape)
        tiles = matrix.view(across, rows, along, columns).transpose(1, 2)
        components = cosines(rows) @ tiles @ cosines(columns).T
        flat = components.reshape(across, along, -1)
        places = flat.abs().topk(min(self._components, rows * columns)).indices
        kept = torch.zeros_like(flat).scatter_(-1, places, flat.gather(-1, places)).view_as(components)
        taken = (cosines(rows).T @ kept @ cosines(columns)).transpose(1, 2).reshape(momentum.shape)
        momentum.sub_(taken)
        return taken


def tiles_of(size: int, most: int) -> tuple[int, int]:
    """How many tiles a dimension has, and their edge: its largest divisor up to `most`.

    >>> tiles_of(384, 64), tiles_of(97, 64)
    ((6, 64), (97, 1))
    """
    edge = max(each for each in range(1, most + 1) if size % each == 0)
    return size // edge, edge


@cache
def cosines(size: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform (type II), of shape (size, size).

    >>> torch.allclose(cosines(8) @ cosines(8).T, torch.eye(8), atol=1e-6)
    True
    """
    angles = torch.outer(torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size
    matrix = angles.cos() * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def demo(components: int) -> tuple[Callable[["Training"], Rival], "BytesOf"]:
    """DeMo with so many components of a tile. A rank receives what each other one sends: as much as from two encodes of
    `RANKS` / 2 times the size."""

    def bytes_of(run: ElementRun) -> int:
        (across, rows), (along, columns) = (tiles_of(size, DeMo.edge) for size in (run.shape[0], run.numel // run.shape[0]))
        return across * along * 6 * min(components, rows * columns)

    return partial(DeMo, components=components), lambda runs: RANKS / 2 * sum(map(bytes_of, runs))


def constant(bytes_an_element: float) -> "BytesOf":
    """The same bytes for all elements."""
    return lambda runs: bytes_an_element * sum(run.numel for run in runs)


BytesOf = Callable[[Sequence[ElementRun]], float]
"""The bytes of some tensors."""
RIVALS: dict[str, tuple[Callable[["Training"], Rival], BytesOf]] = {
    "loco": (LoCo, constant((0.5 + 2 / BLOCK + 2.0) / 2)),
    "onebit-adam": (OneBitAdam, constant(OneBitAdam.exact_part * 4 + (1 - OneBitAdam.exact_part) / 8)),
    "demo32": demo(32),
    "demo128": demo(128),
    "demo4096": demo(4096),
}
"""Each rival by its name, and the mean bytes of its two encodes of some tensors. LoCo gathers weights of 16 bits. One-bit Adam
has its exact steps in the number, since they are a part of any run. DeMo with all components shows what its optimizer does."""
