"""Compares outer steps of local steps with the mean of weights: held-out loss at equal samples, paired by seed, in one process.

    python -m benchmarks outer [--jobs transformer cnn] [--ranks 2 4] [--every 5 10 30 100] [--seeds 0 1 2] [--only WORD ...]

Every rank is a replica with an optimizer of its own, and nothing is encoded. So only the outer step differs between arms. Each
training is one line of benchmarks/results/outer.jsonl, written when the training ends. A training that is in the file is not
repeated. The table of what is known goes into docs/local_steps.md; `--table` trains nothing. The last step ends with an exchange
in every arm.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import markdown
from benchmarks.accuracy.jobs import JOBS, MeasuredJob, job_of
from benchmarks.common import RESULTS, write_between
from benchmarks.paired import interval
from gradwire.engine import lower_second_moments

PATH = RESULTS / "outer.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "local_steps.md"
BEGIN, END = "<!-- outer: made by `python -m benchmarks outer` -->", "<!-- end of outer -->"
STEPS, EVERY, RANKS = 300, (5, 10, 30, 100), (2, 4)
HELD_OUT = 8
"""Batches that the last weights are evaluated on."""
KEYS = "job", "ranks", "every", "arm", "seed", "steps"
"""The fields that name a training."""
SYNCHRONOUS, MEAN = "synchronous SGD", "mean of weights"

Tensors = list[Tensor]


class Cell(NamedTuple):
    """The facts that an outer step may depend on."""

    ranks: int
    every: int


class OuterStep:
    """Makes the global weights of the local ones. The base class makes them the mean."""

    def __init__(self, cell: Cell, weights: Tensors) -> None:
        self.weights = [weight.clone() for weight in weights]
        """The global weights, from which ranks go on."""
        self.memory = [torch.zeros_like(weight) for weight in weights]

    def step(self, mean: Tensors) -> None:
        """Step the global weights by the mean of the local ones."""
        for weight, own in zip(self.weights, mean, strict=True):
            weight.copy_(own)

    @property
    def learned(self) -> Tensors:
        """The weights to evaluate."""
        return self.weights


class Nesterov(OuterStep):
    """SGD with Nesterov momentum, as torch computes it."""

    def __init__(self, cell: Cell, weights: Tensors, lr: float, momentum: float) -> None:
        super().__init__(cell, weights)
        self.lr, self.momentum = lr, momentum

    def step(self, mean: Tensors) -> None:
        for weight, kept, own in zip(self.weights, self.memory, mean, strict=True):
            gradient = weight - own
            kept.mul_(self.momentum).add_(gradient)
            weight.sub_(gradient + self.momentum * kept, alpha=self.lr)


class Scaled(Nesterov):
    """Nesterov momentum that grows with the ranks and with the steps between exchanges.

    One rank has nothing to average, and after a few steps the mean is as good as a synchronous step. So the momentum is 0 in both
    limits. The rate is 1 - momentum: in the long run a step is as long as the mean's.
    """

    def __init__(self, cell: Cell, weights: Tensors) -> None:
        momentum = 0.9 * (1 - 1 / cell.ranks) * min(1.0, cell.every / 100)
        super().__init__(cell, weights, 1 - momentum, momentum)


class TrustRegion(Nesterov):
    """DiLoCo's step, but never farther from the mean than a part of the mean's own step."""

    def __init__(self, cell: Cell, weights: Tensors, radius: float) -> None:
        super().__init__(cell, weights, 0.7, 0.9)
        self.radius = radius

    def step(self, mean: Tensors) -> None:
        before = [weight.clone() for weight in self.weights]
        super().step(mean)
        way = _norm(new - old for new, old in zip(mean, before, strict=True))
        away = _norm(weight - new for weight, new in zip(self.weights, mean, strict=True))
        part = min(1.0, self.radius * way / away) if away else 1.0
        for weight, new in zip(self.weights, mean, strict=True):
            weight.copy_(new + part * (weight - new))


class ScheduleFree(OuterStep):
    """Schedule-free SGD as outer optimizer (Defazio et al. 2024, equations 1 to 3), at a rate of 1.

    Ranks go on from y = (1 - b) z + b x. The mean of their changes moves z. x is the mean of all z so far, and is evaluated.
    """

    def __init__(self, cell: Cell, weights: Tensors, b: float = 0.6) -> None:
        super().__init__(cell, weights)
        self.b, self.steps = b, 0
        self.fast, self.slow = ([weight.clone() for weight in weights] for _ in range(2))

    def step(self, mean: Tensors) -> None:
        self.steps += 1
        for weight, fast, slow, own in zip(self.weights, self.fast, self.slow, mean, strict=True):
            fast.add_(own - weight)
            slow.lerp_(fast, 1 / self.steps)
            weight.copy_(torch.lerp(fast, slow, self.b))

    @property
    def learned(self) -> Tensors:
        return self.slow


class Arm(NamedTuple):
    """A way to train. make: its outer step. states: what an exchange does to the states of inner optimizers; or that after each
    step their second moments are as `gw.LocalSteps` estimates them, or truly those of the mean gradient."""

    make: Callable[[Cell, Tensors], OuterStep]
    states: str = "kept"


ARMS = {
    MEAN: Arm(OuterStep),
    "Nesterov, scaled with H and ranks": Arm(Scaled),
    "Nesterov, rate 0.5, momentum 0.5": Arm(lambda cell, weights: Nesterov(cell, weights, 0.5, 0.5)),
    "trust region, 0.25 of the mean's step": Arm(lambda cell, weights: TrustRegion(cell, weights, 0.25)),
    "trust region, 0.5 of the mean's step": Arm(lambda cell, weights: TrustRegion(cell, weights, 0.5)),
    "trust region, all of the mean's step": Arm(lambda cell, weights: TrustRegion(cell, weights, 1.0)),
    "mean, times the root of the ranks": Arm(lambda cell, weights: Nesterov(cell, weights, cell.ranks**0.5, 0.0)),
    "SNOO: Nesterov, rate 0.75, momentum 0.5": Arm(lambda cell, weights: Nesterov(cell, weights, 0.75, 0.5)),
    "schedule-free": Arm(ScheduleFree),
    "mean, second moments as estimated": Arm(OuterStep, "estimated"),
    "mean, second moments of the mean gradient": Arm(OuterStep, "true"),
    "mean, inner states averaged": Arm(OuterStep, "averaged"),
    "mean, inner states reset": Arm(OuterStep, "reset"),
}


def run(arguments: list[str]) -> int:
    """Train what is not in the file yet, print the table and write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks outer")
    parser.add_argument("--jobs", nargs="+", default=["transformer", "cnn"], choices=list(JOBS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=[""], help="names of arms, or parts of them")
    parser.add_argument("--out", type=Path, default=PATH, help="a file of lines of JSON, to which trainings are added")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if uneven := [every for every in options.every if options.steps % every]:
        parser.error(f"--steps {options.steps} must be a multiple of {uneven[0]}: all arms are to end with an exchange")
    arms = [name for name in ARMS if name == MEAN or any(word in name for word in options.only)]
    torch.set_num_threads(1)
    known = read(options.out)
    for seed, ranks, job in () if options.table else product(options.seeds, options.ranks, options.jobs):
        wanted = [(1, SYNCHRONOUS), *product(options.every, arms)]
        for every, arm in wanted:
            cell = dict(zip(KEYS, (job, ranks, every, arm, seed, options.steps), strict=True))
            if any(all(done[key] == cell[key] for key in KEYS) for done in known):
                continue
            known.append(cell | train(job_of(job, seed), Cell(ranks, every), arm, seed, options.steps))
            with options.out.open("a") as file:
                file.write(json.dumps(known[-1]) + "\n")
            print(f"{job}, {ranks} ranks, every {every}, seed {seed}, {arm}: {known[-1]['loss']:.4f}", flush=True)
    lines = table([each for each in known if each["steps"] == options.steps])
    print("\n".join(lines))
    if options.out == PATH:
        write_between(PAGE, BEGIN, END, lines)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the trainings of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(job: MeasuredJob, cell: Cell, arm: str, seed: int, steps: int) -> dict[str, float]:
    """Train, and return the held-out loss of the last global weights."""
    first = job.make_model(seed)
    if arm == SYNCHRONOUS:
        return {"loss": _synchronous(job, first, cell.ranks, steps)}
    models = [first, *(copy.deepcopy(first) for _ in range(cell.ranks - 1))]
    optimizers = [job.make_optimizer(model) for model in models]
    outer = ARMS[arm].make(cell, [parameter.detach() for parameter in first.parameters()])
    rates = [group["lr"] for group in optimizers[0].param_groups]
    second = [torch.zeros_like(weight) for weight in outer.weights]
    for number in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _set_rates(optimizer, rates, job.rate(number, steps))
            job.loss(model, job.batch(rank, cell.ranks, number)).backward()
            optimizer.step()
        _set_second_moments(optimizers, second, ARMS[arm].states)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if (number + 1) % cell.every == 0:
            _exchange(models, outer)
            _exchange_states(optimizers, ARMS[arm].states)
    with torch.no_grad():
        for parameter, learned in zip(first.parameters(), outer.learned, strict=True):
            parameter.copy_(learned)
    return {"loss": held_out(job, first)}


@torch.no_grad()
def _exchange(models: Sequence[torch.nn.Module], outer: OuterStep) -> None:
    """Step the global weights, and let all ranks go on from them and from the buffers of rank 0."""
    outer.step([torch.stack(same).mean(0) for same in zip(*(model.parameters() for model in models), strict=True)])
    for model in models:
        for parameter, weight in zip(model.parameters(), outer.weights, strict=True):
            parameter.copy_(weight)
        for buffer, own in zip(model.buffers(), models[0].buffers(), strict=True):
            buffer.copy_(own)


@torch.no_grad()
def _set_second_moments(optimizers: Sequence[torch.optim.Optimizer], second: Tensors, how: str) -> None:
    """Set those of Adam, after each step. second: those of the mean gradient so far, which this goes on with."""
    if how == "estimated":
        for optimizer in optimizers:
            lower_second_moments(optimizer, len(optimizers))
    elif how == "true":
        kept = optimizers[0].param_groups[0]["betas"][1]
        of_ranks = ([each for group in optimizer.param_groups for each in group["params"]] for optimizer in optimizers)
        for squares, *same in zip(second, *of_ranks, strict=True):
            mean = torch.stack([each.grad for each in same]).mean(0)
            squares.mul_(kept).addcmul_(mean, mean, value=1 - kept)
            for optimizer, each in zip(optimizers, same, strict=True):
                optimizer.state[each]["exp_avg_sq"].copy_(squares)


@torch.no_grad()
def _exchange_states(optimizers: Sequence[torch.optim.Optimizer], what: str) -> None:
    if what == "reset":
        for optimizer in optimizers:
            optimizer.state.clear()
    elif what == "averaged":
        for same in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
            _average([[value for value in state.values() if isinstance(value, Tensor) and value.dim()] for state in same])


def _average(of_ranks: Sequence[Tensors]) -> None:
    for same in zip(*of_ranks, strict=True):
        mean = torch.stack(same).mean(0)
        for each in same:
            each.copy_(mean)


def _synchronous(job: MeasuredJob, model: torch.nn.Module, ranks: int, steps: int) -> float:
    optimizer = job.make_optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for number in range(steps):
        _set_rates(optimizer, rates, job.rate(number, steps))
        kept: Tensors = []
        for rank in range(ranks):
            (job.loss(model, job.batch(rank, ranks, number)) / ranks).backward()
            kept = kept or [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), kept, strict=False):
            buffer.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return held_out(job, model)


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], part: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * part


@torch.no_grad()
def held_out(job: MeasuredJob, model: torch.nn.Module) -> float:
    """Return the mean loss on data that no rank trains on."""
    model.eval()
    losses = [job.loss(model, batch).item() for batch in job.held_out(HELD_OUT)]
    return sum(losses) / len(losses)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(tensor.pow(2).sum()) for tensor in tensors)) ** 0.5


def table(trainings: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each job, number of ranks and arm, a column for each number of steps between exchanges."""
    by_cell = {tuple(each[key] for key in KEYS[:5]): each["loss"] for each in trainings}
    seeds = sorted({each["seed"] for each in trainings})
    rows = []
    for job, ranks in dict.fromkeys((each["job"], each["ranks"]) for each in trainings):
        for arm in ARMS:
            cells = []
            for every in EVERY:
                both = [
                    (by_cell.get((job, ranks, every, arm, seed)), by_cell.get((job, ranks, *_against(arm, every), seed)))
                    for seed in seeds
                ]
                found = [100 * (own / other - 1) for own, other in both if own is not None and other is not None]
                mean, width = interval(found) if found else (0.0, 0.0)
                cells.append((f"{mean:+.1f} ± {width:.1f}" if len(found) > 1 else f"{mean:+.1f}") if found else "-")
            rows.append((job, ranks, arm, *cells))
    head = ("job", "ranks", "arm", *(f"every {every} steps" for every in EVERY))
    about = (
        f"Held-out loss after {STEPS} steps, {len(seeds)} seeds, in percent with 95 % intervals by Student's t. The row of the "
        "mean is against synchronous SGD. The other rows are against the mean."
    )
    return [about, "", *markdown.table(head, rows, left=3)] if rows else ["Not measured yet."]


def _against(arm: str, every: int) -> tuple[int, str]:
    return (1, SYNCHRONOUS) if arm == MEAN else (every, MEAN)
