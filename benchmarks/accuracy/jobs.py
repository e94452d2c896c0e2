"""Defines jobs for measurements of accuracy: small models, data of which a part is held out, and rates that end at 0.

Three kinds of job suffer from a codec in different ways:

- `transformer` is the bench's decoder, with AdamW.
- `tied` has the layout of GPT-2: the embedding is the head too, and query, key and value share the rows of one matrix.
- `cnn` is the bench's residual network, with momentum.

`wide-transformer` and `wide-tied` are the same at several times the size. `gpt2` is a GPT-2 of transformers, for a check with a
model, a text and a number of parameters that codecs were not tuned on (`--jobs gpt2 --ranks 4 --steps 400`).
"""

import importlib.util
import math
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.jobs import GPT, Batch, DigitsJob, Job, ResNet, TextJob, digits, standard_library_text, text_of
from gradwire.core import near
from gradwire.errors import FormatError

__all__ = ["JOBS", "MeasuredJob", "job_of"]

PAGE = 4096
"""Characters of a page. Every tenth page is held out."""
HELD_OUT_BATCH = 16
"""Samples of a held-out batch, in batches of a rank."""


class MeasuredJob(Job):
    """A job with data that no rank trains on, and a rate for each step."""

    def held_out(self, count: int) -> list[Batch]:
        """Batches of data that no rank trains on, the same for every seed."""
        return [self._draw_held_out(torch.Generator().manual_seed(987_654 + each)) for each in range(count)]

    def rate(self, step: int, steps: int) -> float:
        """The part of the full learning rate in a step: 1 in the first half, then along a line to 0."""
        return min(1.0, 2 * (steps - step) / steps)

    def _draw_held_out(self, generator: torch.Generator) -> Batch:
        raise NotImplementedError


class PagesJob(TextJob, MeasuredJob):
    """Predict the next character of text of which every tenth page is held out."""

    batch_size = 4
    context = 64

    @cached_property
    def text(self) -> Tensor:
        return self._pages[torch.arange(len(self._pages)) % 10 != 9].flatten()

    @cached_property
    def _pages(self) -> Tensor:
        text = self._whole_text()
        return text[: len(text) // PAGE * PAGE].view(-1, PAGE)

    def _whole_text(self) -> Tensor:
        return standard_library_text(self.vocabulary)

    def _draw_held_out(self, generator: torch.Generator) -> Batch:
        pages = self._pages[9::10]
        count = HELD_OUT_BATCH * self.batch_size
        page = torch.randint(len(pages), (count,), generator=generator)
        start = torch.randint(PAGE - self.context - 1, (count,), generator=generator)
        windows = pages[page[:, None], start[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        characters, following = batch
        return functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())


class SmallTransformerJob(PagesJob):
    """The bench's decoder, narrower: 0.14 million parameters, AdamW at 1e-3."""

    name = "transformer"
    width, layers, heads = 72, 2, 2

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def _model(self) -> nn.Module:
        return GPT(self.vocabulary, self.context, self.width, self.layers, self.heads)


class WideTransformerJob(SmallTransformerJob):
    """The same with 0.5 million parameters."""

    name = "wide-transformer"
    width, layers, heads = 96, 4, 2


class SideBySide(nn.Module):
    """An affine layer whose matrix is [inputs, outputs], so that fused layers share its rows, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight + self.bias


def std_of(width: int) -> float:
    """The deviation of first weights that is GPT-2's 0.02 at a width of 768. With 0.02 at small widths the loss stays on a
    plateau for a time that chance decides."""
    return 0.02 * math.sqrt(768 / width)


class TiedBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads, std = heads, std_of(width)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = SideBySide(width, 3 * width, std)
        self.projection = SideBySide(width, width, std / math.sqrt(2 * layers))
        self.widen = SideBySide(width, 4 * width, std)
        self.narrow = SideBySide(4 * width, width, std / math.sqrt(2 * layers))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        wide = functional.gelu(self.widen(self.feed_forward_norm(hidden)), approximate="tanh")
        return cast(Tensor, hidden + self.narrow(wide))


class TiedGPT(nn.Module):
    """GPT-2's layout (Radford et al. 2019): int64 [N, length] to logits [N, length, vocabulary] by the embedding itself."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=std_of(width))
        self.blocks = nn.Sequential(*[TiedBlock(width, heads, layers) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.norm(self.blocks(self.token(characters) + self.position(positions)))
        return cast(Tensor, hidden @ self.token.weight.T)


class TiedJob(PagesJob):
    """GPT-2's layout at 0.14 million parameters, AdamW at 2e-3 with a short warm-up and a cosine to 0."""

    name = "tied"
    width, layers, heads = 72, 2, 2
    warm_up_steps = 20

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    def rate(self, step: int, steps: int) -> float:
        if step < self.warm_up_steps:
            return (step + 1) / self.warm_up_steps
        return 0.5 * (1 + math.cos(math.pi * (step - self.warm_up_steps) / (steps - self.warm_up_steps)))

    def _model(self) -> nn.Module:
        return TiedGPT(self.vocabulary, self.context, self.width, self.layers, self.heads)


class WideTiedJob(TiedJob):
    """The same with 0.9 million parameters."""

    name = "wide-tied"
    width, layers, heads = 160, 3, 5


class GPT2Job(TiedJob):
    """A GPT-2 of transformers with 1.8 million parameters, without dropout, on the source of transformers. Rates as in `tied`."""

    name = "gpt2"
    width, layers, heads = 192, 4, 6

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        characters, following = batch
        logits: Tensor = model(characters, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def _model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "vocab_size": self.vocabulary}
        without: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return cast(nn.Module, GPT2LMHeadModel(GPT2Config(n_positions=self.context, **sizes, **without)))

    def _whole_text(self) -> Tensor:
        found = importlib.util.find_spec("transformers")
        assert found is not None and found.origin is not None
        return text_of(sorted(Path(found.origin).parent.glob("*.py")), self.vocabulary)


class SmallCNNJob(DigitsJob, MeasuredJob):
    """The bench's residual network on digits with noise, narrower: 0.18 million parameters. Every fifth digit is held out."""

    name = "cnn"
    batch_size = 16
    noise = 1.0

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def _model(self) -> nn.Module:
        return ResNet(width=8, classes=10)

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        of_training = torch.arange(len(digits()[1]))
        of_training = of_training[of_training % 5 != 4][rank::world_size]
        return self._noisy(of_training[torch.randint(len(of_training), (self.batch_size,), generator=generator)], generator)

    def _draw_held_out(self, generator: torch.Generator) -> Batch:
        return self._noisy(torch.arange(4, len(digits()[1]), 5), generator)

    def _noisy(self, which: Tensor, generator: torch.Generator) -> Batch:
        images, labels = digits()
        noisy = images[which] + self.noise * torch.randn(len(which), 64, generator=generator)
        square = noisy.view(-1, 1, 8, 8)
        return functional.interpolate(square, size=(32, 32), mode="bilinear", align_corners=False), labels[which]


JOBS: dict[str, type[MeasuredJob]] = {
    job.name: job for job in (SmallTransformerJob, TiedJob, SmallCNNJob, WideTransformerJob, WideTiedJob, GPT2Job)
}


def job_of(name: str, seed: int) -> MeasuredJob:
    """Return the job of this name. Raises FormatError if there is none."""
    if name not in JOBS:
        raise FormatError(f"job is {name!r}: it must be one of {', '.join(JOBS)}{near(name, list(JOBS))}.")
    return JOBS[name](seed)
