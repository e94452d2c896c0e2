"""Measures CD-SGD on the paper's own terms (Yu et al. 2021, section 4): SGD, a tuned local rate, and image models.

    python -m benchmarks cd_sgd --published [--jobs mlp cnn] [--momentum 0.9 0] [--ranks 2 4] [--seeds 0 1 2] [--only k=5]

The jobs have the paper's batch of 32 for each rank: an MLP, and a CNN like LeNet-5, on scikit-learn's digits with noise. A fifth
of the digits is held out. The paper does not name its momentum, so jobs train with 0.9 and without.

The threshold is the paper's, 0.5 for the gradients of a batch of 32 added up, and every rank's whole gradient is quantised. Sums
come back uncompressed, each correction sends the whole gradient, 15 steps are warm-up, and the local update is plain SGD, as in
Algorithm 1. All methods of a seed begin with the same weights and get the same batches. Rates fall to 0 over the second half.

The paper tunes the local rate of each model. So in each cell (a job, its momentum and a number of ranks) k=5 is trained with each
of RATIOS on the first seed, and the ratio with the lowest held-out loss is that of all methods and seeds.

One process trains all ranks, by the recurrences of the `delayed` schedule. Each training is one line of
benchmarks/results/cd_sgd_published.jsonl, written when it ends. A training that is in the file is not repeated, and the smallest
cells come first. The tables go into docs/schedules_measured.md. All takes ten minutes of one core.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwire as gw
from benchmarks import markdown, paired
from benchmarks.common import RESULTS, write_between
from benchmarks.outer import read
from benchmarks.paired import REFERENCE, interval
from gradwire.bench.jobs import Batch, Job, digits

PATH = RESULTS / "cd_sgd_published.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "schedules_measured.md"
BEGIN = "<!-- cd_sgd_published: made by `python -m benchmarks cd_sgd --published` -->"
END = "<!-- end of cd_sgd_published -->"
WARMUP_STEPS = 15
T = 0.5 / 32
"""The paper's threshold, for gradients of a mean loss."""
EVERY = (2, 5, 10, 20)
RATIOS = (0.125, 0.25, 1.0, 4.0, 10.0)
"""Local rates over global ones. The paper has 0.05 with 0.4, 0.1 with 0.4, and 0.4 with 0.1. 10 is what a gradient moves weights
in the long run at momentum 0.9."""
TUNED = "CD-SGD, k=5"
BIT, OD, NEVER = "BIT-SGD", "OD-SGD", "CD-SGD, never corrects"
STEPS = 200
METHODS = (REFERENCE, BIT, OD, *(f"CD-SGD, k={k}" for k in EVERY), NEVER)
"""The paper's methods, and CD-SGD without corrections, which shows what they bring."""
KEYS = "job", "momentum", "ranks", "steps", "seed", "method", "ratio"
"""The fields that name a training."""
BATCH_SIZE, TRAINED_ON, NOISE = 32, 1437, 1.0
"""Images of a rank in a step, the first digits that are trained on, and the deviation of the noise over that of the images."""


class Cell(NamedTuple):
    """Trainings that are compared."""

    job: str
    momentum: float
    ranks: int

    def __str__(self) -> str:
        return f"{self.job}, {'no momentum' if not self.momentum else f'momentum {self.momentum:g}'}, {self.ranks} ranks"


class Method(NamedTuple):
    """One way to train."""

    name: str
    ratio: float | None = None
    """The local rate over the global one; None where there is no local update."""

    @property
    def schedule(self) -> gw.Delayed | None:
        """The method as a schedule; None for synchronous SGD."""
        if self.name == REFERENCE:
            return None
        if self.name == BIT:
            return gw.Delayed(None, warmup_steps=WARMUP_STEPS, local_update=False)
        k = 1 if self.name == OD else None if self.name == NEVER else int(self.name.rpartition("=")[2])
        return gw.Delayed.cd_sgd(k, WARMUP_STEPS, local_ratio=self.ratio or 1.0)


FIRST = (Method(REFERENCE), Method(BIT), *(Method(TUNED, ratio) for ratio in RATIOS))
"""The methods that a cell trains on its first seed before its local rate is known."""


def methods_with(ratio: float) -> list[Method]:
    """All methods of a cell with its tuned local rate."""
    return [Method(name, None if name in (REFERENCE, BIT) else ratio) for name in METHODS]


def run(arguments: list[str]) -> int:
    """Train what is missing, write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cd_sgd --published")
    parser.add_argument("--jobs", nargs="+", default=[*_JOBS], choices=[*_JOBS])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.9, 0.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="names of methods, or parts of them")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells = [Cell(job, momentum, ranks) for momentum, ranks, job in product(options.momentum, options.ranks, options.jobs)]
    for cell in () if options.table else cells:
        if not tuned_ratio(cell, read(PATH)):
            _train(cell, options.seeds[0], FIRST)
        ratio = tuned_ratio(cell, read(PATH))
        assert ratio is not None, "it was tuned just now"
        wanted = [each for each in methods_with(ratio) if each.name == REFERENCE or any(w in each.name for w in options.only)]
        for seed in options.seeds:
            _train(cell, seed, wanted)
    lines = tables(read(PATH))
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return 0


def _train(cell: Cell, seed: int, methods: Sequence[Method]) -> None:
    """Train the methods that are missing, and add them to the file."""
    about = {**cell._asdict(), "steps": STEPS, "seed": seed}
    done = {tuple(line[key] for key in KEYS) for line in read(PATH)}
    missing = [each for each in methods if (*about.values(), each.name, each.ratio) not in done]
    found = train(cell, seed, missing) if missing else []
    with PATH.open("a") as file:
        for method, line in zip(missing, found, strict=True):
            file.write(json.dumps({**about, "method": method.name, "ratio": method.ratio, **line}) + "\n")
            print(f"{cell}, seed {seed}, {method.name}, {method.ratio}: {line}", flush=True)


# ---- what is made of it


def tuned_ratio(cell: Cell, lines: Sequence[dict[str, Any]]) -> float | None:
    """The ratio with which k=5 ends lowest on the lowest seed that all ratios have; None if there is no such seed."""
    losses = {ratio: {line["seed"]: line["loss"] for line in _of(cell, lines, Method(TUNED, ratio))} for ratio in RATIOS}
    common = set.intersection(*map(set, losses.values()))
    return min(RATIOS, key=lambda ratio: losses[ratio][min(common)]) if common else None


def _of(cell: Cell, lines: Sequence[dict[str, Any]], method: Method) -> Iterator[dict[str, Any]]:
    for line in lines:
        if (line["job"], line["momentum"], line["ranks"]) == cell and (line["method"], line["ratio"]) == method:
            yield line


def _against(cell: Cell, lines: Sequence[dict[str, Any]], method: Method) -> tuple[list[float], list[float], list[float]]:
    """Losses, how many percent they are above the reference's, and accuracies minus the reference's in points; by seed."""
    reference = {line["seed"]: line for line in _of(cell, lines, Method(REFERENCE))}
    pairs = [(line, reference[line["seed"]]) for line in _of(cell, lines, method) if line["seed"] in reference]
    losses = [own["loss"] for own, _ in pairs]
    ratios = [100 * (own["loss"] / other["loss"] - 1) for own, other in pairs]
    return losses, ratios, [100 * (own["accuracy"] - other["accuracy"]) for own, other in pairs]


def _spread(values: Sequence[float], unit: str = "") -> str:
    mean, width = interval(values)
    return f"{mean:+.1f}{unit} ± {width:.1f}{unit}" if len(values) > 1 else f"{mean:+.1f}{unit}"


def tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the methods of each cell against synchronous SGD, then the local rates that were tried."""
    cells = list(dict.fromkeys(Cell(line["job"], line["momentum"], line["ranks"]) for line in lines))
    rows, tuning = [], []
    for cell in cells:
        ratio = tuned_ratio(cell, lines)
        for method in methods_with(ratio) if ratio else ():
            losses, over, points = _against(cell, lines, method)
            if losses:
                own = ("0", "0") if method.name == REFERENCE else (_spread(over, "%"), _spread(points))
                rows.append((cell, method.name, len(losses), f"{fmean(losses):.3f}", *own))
        tried = [_against(cell, lines, Method(TUNED, each))[1] for each in RATIOS]
        if all(tried):
            tuning.append((cell, *(f"{over[0]:+.0f}%" for over in tried)))
    head = ("job", "method", "seeds", "held-out loss", "against S-SGD", "accuracy against S-SGD, points")
    tried_head = ("k=5 on one seed, by local rate over global", *(f"{ratio:g}" for ratio in RATIOS))
    return [*markdown.table(head, rows, left=2), "", *markdown.table(tried_head, tuning, left=1)]


# ---- jobs


class SmallDigits(Job):
    """Classify the digits with noise, 32 images for each rank. A fifth of them is held out."""

    batch_size = BATCH_SIZE

    def __init__(self, seed: int, momentum: float) -> None:
        super().__init__(seed)
        self.momentum = momentum
        self.full_rate = 0.05 if momentum else 0.1
        """Without momentum LeNet-5's global rate in the paper."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.full_rate, momentum=self.momentum)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def held_out(self) -> list[Batch]:
        """Held-out batches, the same for every seed."""
        images, labels = (each[TRAINED_ON:] for each in digits())
        noise = (torch.randn(images.shape, generator=torch.Generator().manual_seed(each)) for each in range(10))
        return [(images + NOISE * each, labels) for each in noise]

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        images, labels = digits()
        share = torch.arange(rank, TRAINED_ON, world_size)
        chosen = share[torch.randint(len(share), (self.batch_size,), generator=generator)]
        return images[chosen] + NOISE * torch.randn(self.batch_size, 64, generator=generator), labels[chosen]


class SmallMLP(SmallDigits):
    """Two hidden layers."""

    name = "mlp"

    def _model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class SmallCNN(SmallDigits):
    """Two convolutions with pooling and two affine layers, as LeNet-5 has them, for images of 8x8."""

    name = "cnn"

    def _model(self) -> nn.Module:
        features = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), *features, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )


_JOBS: dict[str, type[SmallDigits]] = {job.name: job for job in (SmallMLP, SmallCNN)}


# ---- all ranks in one process


class Ranks:
    """All ranks of one training: their local weights and residuals, and the global weights. Weights are one flat vector."""

    def __init__(self, method: Method, job: SmallDigits, world: int, seed: int, steps: int) -> None:
        self.method, self.job, self.world, self.steps = method, job, world, steps
        self.schedule = method.schedule
        self.model = job.make_model(seed)
        parameters = list(self.model.parameters())
        self._held = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._gradient = torch.zeros_like(self._held)
        for held, gradient, p in zip(self._views(self._held), self._views(self._gradient), parameters, strict=True):
            p.data, p.grad = held, gradient
        self.weights = self._held.clone()
        """The global weights."""
        self.local = [self.weights] * world
        """The weights that each rank computes its next gradient on."""
        self.residuals = [torch.zeros_like(self.weights) for _ in range(world)]
        self._velocity = torch.zeros_like(self.weights)

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.model.parameters()]
        return [view.view_as(p) for view, p in zip(flat.split(sizes), self.model.parameters(), strict=True)]

    @torch.no_grad()
    def step(self, number: int, batches: Sequence[Batch]) -> None:
        """Train one step: Algorithm 1 of the paper, and its equations 10 and 11."""
        rate = self.job.full_rate * min(1.0, (self.steps - number) / (paired.FALLING * self.steps))
        gradients = [self._gradient_of(rank, batch) for rank, batch in enumerate(batches)]
        sent = [self._sent(number, rank, gradient) for rank, gradient in enumerate(gradients)]
        self._velocity.mul_(self.job.momentum).add_(sum(sent[1:], sent[0]), alpha=1 / self.world)
        updated = self.weights.sub(self._velocity, alpha=rate)
        if self.schedule is None or self.schedule.lands(number):
            self.local = [updated] * self.world
        else:
            local_rate = rate * self.schedule.local_ratio
            self.local = [self.weights.sub(gradient, alpha=local_rate) for gradient in gradients]
        self.weights = updated

    def _gradient_of(self, rank: int, batch: Batch) -> Tensor:
        self._held.copy_(self.local[rank])
        self._gradient.zero_()
        with torch.enable_grad():
            self.job.loss(self.model, batch).backward()
        return self._gradient.clone()

    def _sent(self, number: int, rank: int, gradient: Tensor) -> Tensor:
        """The gradient as it is, or its 2-bit codes with a residual."""
        schedule = self.schedule
        since = number - WARMUP_STEPS
        if schedule is None or since < 0 or (schedule.every is not None and since % schedule.every == 0):
            return gradient
        total = self.residuals[rank].add_(gradient)
        codes = T * ((total >= T).float() - (total <= -T).float())
        total.sub_(codes)
        return codes

    @torch.no_grad()
    def found(self) -> dict[str, float]:
        """Mean loss and accuracy of the global weights on held-out batches."""
        self._held.copy_(self.weights)
        losses, hits = [], []
        for batch in self.job.held_out():
            losses.append(self.job.loss(self.model, batch).item())
            hits.append((self.model(batch[0]).argmax(-1) == batch[1]).float().mean().item())
        return {"loss": fmean(losses), "accuracy": fmean(hits)}


def train(cell: Cell, seed: int, methods: Sequence[Method]) -> list[dict[str, float]]:
    """Train these methods side by side; what each ends with."""
    job = _JOBS[cell.job](seed, cell.momentum)
    running = [Ranks(method, job, cell.ranks, seed, STEPS) for method in methods]
    for step in range(STEPS):
        batches = [job.batch(rank, cell.ranks, step) for rank in range(cell.ranks)]
        for ranks in running:
            ranks.step(step, batches)
    return [ranks.found() for ranks in running]
