"""Defines training jobs that are small enough for one core and large enough to suffer from a slow link.

A job gives every method the same model and the same batches, so methods differ only in their communication. Nothing is
downloaded: the data are scikit-learn's digits and the source text of the running Python's standard library.

>>> job = make_job("mlp")
>>> model = job.make_model(seed=0)
>>> loss = job.loss(model, job.batch(rank=0, world_size=2, step=0))
"""

import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import gradwire as gw
from gradwire.bench.names import check_job
from gradwire.core import Spec
from gradwire.errors import StepStateError
from gradwire.profiler import WARMUP_STEPS, Profiling

TEXT_BYTES = 4_000_000
"""The length of the text. The limit makes the text about equally long under every Python version."""
Batch = tuple[Tensor, Tensor]
"""The inputs and the targets of one rank for one step."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits, shuffled once: float32 images [1797, 64] of mean 0 and deviation 1, labels [1797]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(images, dtype=torch.float32)[order]
    return (inputs - inputs.mean()) / inputs.std(), torch.tensor(labels, dtype=torch.int64)[order]


@cache
def standard_library_text(vocabulary: int) -> Tensor:
    """Return the standard library's top-level modules in name order, as int64 characters. They depend on the Python version.

    The few bytes at or above `vocabulary` become the last character.
    """
    return text_of(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), vocabulary)


def text_of(files: Iterable[Path], vocabulary: int) -> Tensor:
    """Return the first `TEXT_BYTES` bytes of files as int64 characters, as `standard_library_text` does."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    characters = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).to(torch.int64)
    return characters.clamp_(max=vocabulary - 1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


class ResNet(nn.Module):
    """ResNet-18's layout (He et al. 2016) at a chosen width: [N, 1, 32, 32] to [N, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
        for stage in range(4):
            after = width * 2**stage
            stages += [ResidualBlock(before, after, 1 if stage == 0 else 2), ResidualBlock(after, after, 1)]
            before = after
        self.features = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(images)))


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer of four times the width, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return cast(Tensor, hidden + self.feed_forward(self.feed_forward_norm(hidden)))


class GPT(nn.Module):
    """A pre-norm decoder (Radford et al. 2019) over characters: int64 [N, length] to logits [N, length, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # torch's own initialisation elsewhere: with 0.02 throughout, 300 steps never leave the plateau at 2.9
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.blocks(self.token(characters) + self.position(positions))
        return cast(Tensor, self.head(self.norm(hidden)))


class HashedContexts(nn.Module):
    """Two embedding tables, and a small MLP that reads their rows: int64 [N, 2] to logits [N, outputs]."""

    def __init__(self, rows: int, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.near, self.far = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, contexts: Tensor) -> Tensor:
        near, far = contexts.unbind(1)
        return cast(Tensor, self.mlp(torch.cat([self.near(near), self.far(far)], 1)))


class Job(ABC):
    """A model, its optimizer, its data and its loss. `seed` chooses the batches; `make_model` takes another seed."""

    name: str
    batch_size: int

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def make_model(self, seed: int) -> nn.Module:
        """Return a new model that the seed determines. torch's global generator does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._model()

    def batch(self, rank: int, world_size: int, step: int) -> Batch:
        """Return the batch of a rank in a step, from the rank's share of the data. Equal calls return equal batches."""
        generator = torch.Generator()
        # within a run, every (step, rank) has another seed
        generator.manual_seed((self.seed * 1_000_003 + step) * world_size + rank)
        return self._draw(rank, world_size, generator)

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the job's optimizer for this model."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of the batch, a scalar with a gradient."""

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
        layers: list[nn.Module] = []
        for before, after in pairwise((64, 1344, 1344, 1344, 1344)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1344, 10))


class ResNetJob(DigitsJob):
    """A residual network with BatchNorm on the digits at 32x32: many small tensors and a few large ones.

    Every batch adds new noise with the images' deviation. Without noise it would memorise them within a hundred steps.
    """

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
        return ResNet(width=32, classes=10)


class TextJob(Job):
    """Predict the next character of the standard library's source. Rank r reads the r-th of world_size equal parts."""

    context: int
    vocabulary = 128

    @cached_property
    def text(self) -> Tensor:
        """Return the whole text as int64 characters below `vocabulary`."""
        return standard_library_text(self.vocabulary)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # its time does not depend on gradients' zeros

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        share = len(self.text) // world_size
        starts = torch.randint(share - self.context - 1, (self.batch_size,), generator=generator) + rank * share
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class TransformerJob(TextJob):
    """A decoder that predicts every character of its context."""

    name = "transformer"
    batch_size = 4
    context = 64

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        characters, following = batch
        return functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())

    def _model(self) -> nn.Module:
        return GPT(vocabulary=self.vocabulary, context=self.context, width=288, layers=6, heads=6)


class BertJob(TransformerJob):
    """The transformer with the layers of BERT-medium: 8 of width 512."""

    name = "bert"

    def _model(self) -> nn.Module:
        return GPT(vocabulary=self.vocabulary, context=self.context, width=512, layers=8, heads=8)


class EmbeddingsJob(TextJob):
    """Two embedding tables with a row for every hash of three characters: those before the next one, and the three before.

    The tables hold nearly all parameters, and a batch uses few of their rows. So steps compute little, with large gradients.
    """

    name = "embeddings"
    batch_size = 512
    context = 6
    rows = 60_000

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        contexts, following = batch
        return functional.cross_entropy(model(contexts), following)

    def _model(self) -> nn.Module:
        return HashedContexts(self.rows, width=64, hidden=256, outputs=self.vocabulary)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        characters, following = super()._draw(rank, world_size, generator)
        places = torch.tensor([self.vocabulary**2, self.vocabulary, 1])
        hashed = [(part * places).sum(1) % self.rows for part in (characters[:, 3:], characters[:, :3])]
        return torch.stack(hashed, 1), following[:, -1].contiguous()


_JOBS: dict[str, Callable[[int], Job]] = {job.name: job for job in (TransformerJob, MLPJob, ResNetJob, EmbeddingsJob, BertJob)}


def make_job(name: str, seed: int = 0) -> Job:
    """Return the job of this name. Raises `FormatError` if there is none."""
    check_job(name)
    return _JOBS[name](seed)


def profile_job(job: Job, folder: Path, steps: int, specs: Sequence[Spec], plan: Spec) -> Profiling:
    """Train the job under a uniform plan and profile it, with one compute thread per rank. Collective.

    Raises StepStateError without at least two ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise StepStateError(
            "there is one rank, and a profile measures links between ranks. Start two ranks or more, for example: gradwire "
            f"emulate --nodes 2 --inter 500mbit -- -m gradwire profile --job {job.name}"
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        model = job.make_model(seed=0)
        optimizer = job.make_optimizer(model)
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(plan))
        count = WARMUP_STEPS + 2 * steps
        batches = [job.batch(dist.get_rank(), dist.get_world_size(), step) for step in range(count)]
        with handle.profile(folder, steps, specs) as found:
            for batch in batches:
                loss = job.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
        handle.detach()
        return found
    finally:
        dist.destroy_process_group()
