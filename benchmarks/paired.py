"""Functions that benchmarks of learning share: training side by side on two ranks of plain loopback, paired by seed and data.

All arms of a seed begin with the same weights and get the same batches; towards the end the global weights are evaluated, several
times, on the same batches that no arm has trained on. What is measured is written at once, so that a long run can be cut in
pieces.

A job's name may end in a factor of its learning rate: `transformer@0.5` trains the transformer at half of its rate.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

import gradwire as gw
from benchmarks import markdown
from benchmarks.common import collected, write
from gradwire.auto.adaptive_bits import Assigned
from gradwire.bench.jobs import Job, make_job
from gradwire.bench.loopback import Loopback

TOGETHER = 4
"""Arms that take turns step by step in the same two processes."""
HELD_OUT = 50
"""Batches that weights are evaluated on."""
LOOKS, LOOK_EVERY = 4, 5
"""Evaluations, of which the mean counts, and steps between them."""
FALLING = 0.5
"""The last part of the training, in which rates fall to 0 along a line: at constant rates equally good trainings of the CNN end
3 % apart by chance."""
REFERENCE = "S-SGD"
BOUNDS = {"loss": 0.01, "accuracy": 0.01}
"""Within which an interval should lie: 1 % of the loss, one point of accuracy."""
NUDGE = 1e-6

DESIGN = {"ranks": 2, "held_out": HELD_OUT, "looks": LOOKS, "falling": FALLING}
"""The settings that must be equal for trainings to be compared."""

Found = dict[str, float]
"""Loss and accuracy at the end of one training; of adaptive bits also `size`, their bytes over those of 4 bits."""
Finals = dict[str, dict[str, dict[str, Found]]]
"""Results by job, arm and seed."""


class Arm(NamedTuple):
    """One way to train."""

    plan: Any
    """The plan as `gradwire.parallelize` takes it."""
    skipped: int = 0
    """Every so many steps the gradient is dropped on all ranks; 0 never."""
    expected: bool = False
    """Whether its interval should lie within the bounds."""
    nudged: bool = False
    """Whether its first weights are a millionth larger: as good as the reference's, and another training by chance."""


PLAIN = {REFERENCE: Arm(gw.Uniform(gw.Identity())), "S-SGD nudged (chance alone)": Arm(gw.Uniform(gw.Identity()), nudged=True)}
"""The arms that others are compared with, and the arms that show how far equally good trainings come apart."""


def parser_of(part: str, seeds: int) -> argparse.ArgumentParser:
    """Options of a benchmark of learning: jobs, seeds, steps, only, again."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {part}")
    parser.add_argument(
        "--jobs", nargs="+", default=["transformer", "resnet"], help="names, transformer@0.5 at half of its learning rate"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", default=[""], help="names, or parts of them")
    parser.add_argument("--again", action="store_true", help="measure what is already known, too")
    return parser


def chosen(arms: Mapping[str, Arm], only: Sequence[str]) -> list[str]:
    """The reference and the arms that words of --only name. A whole name names that arm alone, even where others contain it."""
    return [arm for arm in arms if arm == REFERENCE or any(word == arm if word in arms else word in arm for word in only)]


def measure(
    path: Path,
    options: argparse.Namespace,
    names: Sequence[str],
    train: Callable[[str, int, int, list[str]], Mapping[str, Any]],
    about: Mapping[str, Any],
    together: int = TOGETHER,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the missing results of `names`, write each at once, and return all known results by job, name and seed.

    train: a function from job, seed, steps and a few names to the result of each name. about: further entries of the file.
    given: results of another benchmark, by job, name and seed. The first names come first, over all seeds and jobs.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    if options.again:
        known = {key: value for key, value in known.items() if key not in ("steps", "finals", *about)}
    if known.get("steps", options.steps) != options.steps:
        raise SystemExit(f"{path.name} holds runs of {known['steps']} steps: pass --steps {known['steps']}, or --again.")
    known.pop("made", None)
    if "finals" in known and (other := {key for key, value in about.items() if known.get(key) != value}):
        raise SystemExit(
            f"{path.name} holds runs with another {', '.join(sorted(other))}, which cannot be compared: pass --again."
        )
    finals: dict[str, Any] = known.setdefault("finals", {})
    for job, name in itertools.product(given or {}, names):
        if given and name in given[job]:
            done = finals.setdefault(job, {})
            done[name] = given[job][name] | done.get(name, {})
    for start in range(0, len(names), together):
        for seed in options.seeds:
            for job in options.jobs:
                done = finals.setdefault(job, {})
                missing = [name for name in names[start : start + together] if str(seed) not in done.get(name, {})]
                if not missing:
                    continue
                for name, found in train(job, seed, options.steps, missing).items():
                    done.setdefault(name, {})[str(seed)] = found
                    print(f"{job}, seed {seed}, {name}: {found}", flush=True)
                write(path, {"steps": options.steps} | about | known)
    return finals


def on_ranks(module: str, job: str, seed: int, steps: int, names: Sequence[str], world: int = 2) -> dict[str, Any]:
    """Return the JSON that rank 0 of `python -m MODULE JOB SEED STEPS NAMES` prints: a result for each name.

    Raises SystemExit if the ranks did not come to their end.
    """
    with Loopback(world) as ranks:
        return collected(ranks, module, (job, seed, steps, json.dumps(list(names))), f"{job}, seed {seed}")


# ---- what is made of it


def differences(found: dict[str, dict[str, Found]], arm: str, measure: str, other: str = REFERENCE) -> list[float]:
    """Return by seed how much more an arm has than another: of the loss as a share of the other's, of accuracy in
    points (0.01 is one)."""
    own, reference = found.get(arm, {}), found.get(other, {})
    pairs = [(own[seed][measure], reference[seed][measure]) for seed in own if seed in reference]
    return [a / b - 1 if measure == "loss" else a - b for a, b in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval by Student's t; infinite for one value, and where training diverged."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, float("inf")
    from scipy.stats import t  # type: ignore[import-untyped]

    quantile = float(t.ppf(0.975, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / len(values) ** 0.5


def table(
    finals: Finals, arms: Iterable[str], other: Callable[[str], str] = lambda arm: REFERENCE, others: str = REFERENCE
) -> list[str]:
    """Return Markdown: a row for every job and arm, with the arm that it is compared with. others: the heading of those
    arms."""
    rows = []
    for job, found in finals.items():
        for arm in arms:
            if arm == (beside := other(arm)) or not (seeds := differences(found, arm, "loss", beside)):
                continue
            loss, width = interval(seeds)
            points, around = interval(differences(found, arm, "accuracy", beside))
            accuracy = f"{100 * points:+.2f} ± {100 * around:.2f}"
            rows.append((job, arm, len(seeds), f"{loss:+.2%} ± {width:.2%}", accuracy))
    return markdown.table(("job", "arm", "seeds", f"loss against {others}", "accuracy, points"), rows) if rows else []


def verdict(finals: Finals, arms: Mapping[str, Arm]) -> int:
    """1 if an interval that should lie within the bounds does not, or that of a broken arm does."""
    wrong = []
    for job, found in finals.items():
        for name, arm in arms.items():
            if name not in found or not (arm.expected or arm.skipped):
                continue
            within = {
                measure: abs(mean) + width <= bound
                for measure, bound in BOUNDS.items()
                for mean, width in [interval(differences(found, name, measure))]
            }
            if arm.expected and not all(within.values()):
                wrong.append(f"{job}, {name}: the interval of {', '.join(m for m, ok in within.items() if not ok)} is beyond 1 %")
            if arm.skipped and all(within.values()):
                wrong.append(f"{job}, {name}: the test does not see that corrections carry nothing")
    print("\n".join(wrong))
    return 1 if wrong else 0


# ---- on the ranks


class Training:
    """One arm on one rank."""

    def __init__(self, arm: Arm, job: Job, seed: int, steps: int, fused: bool = False, rate: float = 1.0) -> None:
        self.arm, self.job, self.model = arm, job, job.make_model(seed)
        if arm.nudged:
            with torch.no_grad():
                next(self.model.parameters()).mul_(1 + NUDGE)
        self.optimizer = job.make_optimizer(self.model)
        for group in self.optimizer.param_groups if fused else ():
            group["fused"] = True
        self.rates = LambdaLR(self.optimizer, lambda step: rate * min(1.0, (steps - step) / (FALLING * steps)))
        self.handle = gw.parallelize(self.model, self.optimizer, plan=arm.plan)
        self.trained: list[float] = []
        self.losses: list[float] = []
        self.hits: list[float] = []

    def step(self, number: int, batch: Any) -> None:
        loss = self.job.loss(self.model, batch)
        loss.backward()
        self.trained.append(loss.item())
        if self.arm.skipped and number % self.arm.skipped == 0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def look(self, batches: Sequence[Any]) -> None:
        """Evaluate the global weights. Needs no other rank."""
        self.model.eval()
        for inputs, targets in batches:
            outputs = self.model(inputs)
            loss = self.job.loss(lambda _, of=outputs: of, (inputs, targets))  # type: ignore[arg-type,misc]
            self.losses.append(loss.item())
            self.hits.append((outputs.argmax(-1) == targets).float().mean().item())
        self.model.train()

    def found(self) -> Found:
        """The means over all looks."""
        found = {"loss": statistics.fmean(self.losses), "accuracy": statistics.fmean(self.hits)}
        if chosen := [each for each in self.handle.decisions if isinstance(each, Assigned)]:
            found["size"] = statistics.fmean(each.nbytes / each.uniform_nbytes for each in chosen)
        return found


def train_on_rank(
    arms: Mapping[str, Arm],
    job_name: str,
    seed: int,
    steps: int,
    names: Sequence[str],
    looks: int = LOOKS,
    fused: bool = False,
    also: Callable[[Training], Mapping[str, Any]] | None = None,
) -> None:
    """One of the processes: train these arms in turns, and print what rank 0 finds, and what `also` makes of its trainings.

    fused: in torch's fused optimizers, which are 2 to 6 times as fast on a CPU and round differently.
    """
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    name_of_job, _, rate = job_name.partition("@")
    job = make_job(name_of_job, seed)
    running = {name: Training(arms[name], job, seed, steps, fused, float(rate or 1.0)) for name in names}
    held_out = [job.batch(each % world, world, steps + each) for each in range(HELD_OUT)]
    looked_at = {steps - 1 - LOOK_EVERY * each for each in range(looks)}
    for step in range(steps):
        batch = job.batch(rank, world, step)
        for training in running.values():
            training.step(step, batch)
            if rank == 0 and step in looked_at:
                training.look(held_out)
    found = {}
    if rank == 0:
        found = {name: {**training.found(), **(also(training) if also else {})} for name, training in running.items()}
    dist.barrier()
    for training in running.values():
        training.handle.detach()
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
