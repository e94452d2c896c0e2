"""Training jobs that are small enough for one core and large enough to suffer from a slow link.

A job gives every method the same model and the same batches, so methods differ only in their communication. Nothing is
downloaded: the data are scikit-learn's digits and the source text of the running Python's standard library.

>>> job = make_job("mlp")
>>> model = job.make_model(seed=0)
>>> loss = job.loss(model, job.batch(rank=0, world_size=2, step=0))
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench import models
from gradwire.bench.data import digits, standard_library_text
from gradwire.bench.names import check_job

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of one rank for one step."""


class Job(ABC):
    """A model, its optimizer, its data and its loss. `seed` chooses the batches; `make_model` takes another seed."""

    name: str
    batch_size: int

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def make_model(self, seed: int) -> nn.Module:
        """A new model, determined by the seed. torch's global generator does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._model()

    def batch(self, rank: int, world_size: int, step: int) -> Batch:
        """The batch of a rank in a step, from the rank's share of the data. Equal calls return equal batches."""
        generator = torch.Generator()
        # within a run, every (step, rank) has another seed
        generator.manual_seed((self.seed * 1_000_003 + step) * world_size + rank)
        return self._draw(rank, world_size, generator)

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The job's optimizer for this model."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch, a scalar with a gradient."""

    @abstractmethod
    def _model(self) -> nn.Module: ...

    @abstractmethod
    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch: ...


class DigitsJob(Job):
    """Classify scikit-learn's 1,797 digits of 8x8 pixels. Rank r owns samples r, r + world_size, ..."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        images, labels = digits()
        share = torch.arange(rank, len(labels), world_size)
        chosen = share[torch.randint(len(share), (self.batch_size,), generator=generator)]
        return images[chosen], labels[chosen]


class MLPJob(DigitsJob):
    """Four wide hidden layers. Three large square matrices hold nearly all parameters."""

    name = "mlp"
    batch_size = 384

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def _model(self) -> nn.Module:
        return models.multilayer_perceptron(inputs=64, hidden=1344, hidden_layers=4, classes=10)


class ResNetJob(DigitsJob):
    """A residual network with BatchNorm on the digits at 32x32: many small tensors and a few large ones. Every batch adds new
    noise of the images' deviation, because the network would memorise clean images within a hundred steps."""

    name = "resnet"
    batch_size = 96
    noise = 1.0

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        images, labels = super()._draw(rank, world_size, generator)
        images = images + self.noise * torch.randn(images.shape, generator=generator)
        square = images.view(-1, 1, 8, 8)
        return functional.interpolate(square, size=(32, 32), mode="bilinear", align_corners=False), labels

    def _model(self) -> nn.Module:
        return models.ResNet(width=32, classes=10)


class TransformerJob(Job):
    """Predict the next character of the standard library's source. Rank r reads the r-th of world_size equal parts."""

    name = "transformer"
    batch_size = 4
    context = 64
    vocabulary = 128

    @cached_property
    def text(self) -> Tensor:
        """The whole text as int64 characters below `vocabulary`."""
        return standard_library_text(self.vocabulary)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        characters, following = batch
        return functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())

    def _model(self) -> nn.Module:
        return models.GPT(vocabulary=self.vocabulary, context=self.context, width=288, layers=6, heads=6)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        share = len(self.text) // world_size
        starts = torch.randint(share - self.context - 1, (self.batch_size,), generator=generator) + rank * share
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


_JOBS: dict[str, Callable[[int], Job]] = {job.name: job for job in (TransformerJob, MLPJob, ResNetJob)}


def make_job(name: str, seed: int = 0) -> Job:
    """The job of this name. Raises `FormatError` if there is none."""
    check_job(name)
    return _JOBS[name](seed)
