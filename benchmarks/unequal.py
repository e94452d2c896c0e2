"""Trains on two ranks of which one computes at half speed: samples a second, and held-out loss at equal samples.

    python -m benchmarks unequal [--speed] [--loss] [--jobs transformer cnn] [--seeds 0 1 2] [--only WORD ...]

`--speed` measures samples a second. Each sample takes a rank a given time. The rank sleeps for the part in which it does not
compute, so two ranks fit on one core. "Alone" is the sum of the speeds of both ranks without an exchange. The arm with
batch_share begins with equal batches under plan="auto", and adopts the parts of `handle.decision.batch_share` as soon as they are
there. The steps after that count.

`--loss` trains for equally many samples, without sleeping. The fast rank has two thirds of them, where an arm divides by speed.
The learning rate falls to 0 in the last half. Without an option both parts are measured. Each result is one line of
benchmarks/results/unequal.jsonl, and is not measured again. The tables go into docs/how-to/unequal.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import gradwire as gw
from benchmarks import markdown
from benchmarks.accuracy.jobs import JOBS, MeasuredJob, job_of
from benchmarks.common import RESULTS, collected, write_between
from benchmarks.outer import held_out, read
from benchmarks.paired import interval
from gradwire.bench.loopback import Loopback

PATH = RESULTS / "unequal.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "unequal.md"
BEGIN, END = "<!-- unequal: made by `python -m benchmarks unequal` -->", "<!-- end of unequal -->"
SAMPLE_MS = (20.0, 40.0)
"""Milliseconds of a sample on each rank, where speed is measured."""
BATCH, EVERY = 16, 10
"""Samples of both ranks in a step with equal batches, and local steps between exchanges."""
SPEED_STEPS = 30
"""Steps of the fast rank that count, where speed is measured."""
LOSS_SAMPLES = 4800
SHARES = (2 / 3, 1 / 3)
ALONE, EQUAL = "alone, the sum", "each step, equal batches"


class Arm(NamedTuple):
    """A way to train. batches: samples of each rank. schedule: None trains alone."""

    batches: tuple[int, ...]
    schedule: gw.LocalSteps | gw.Backward | None
    auto: bool = False
    """Whether plan="auto" proposes the batches."""


HALVES, PARTS = (BATCH // 2, BATCH // 2), (BATCH - round(BATCH / 3), round(BATCH / 3))
LOCAL = gw.LocalSteps(every=EVERY)
ARMS = {
    ALONE: Arm(HALVES, None),
    EQUAL: Arm(HALVES, gw.Backward()),
    "each step, by batch_share": Arm(PARTS, gw.Backward(), auto=True),
    "local steps, equally many": Arm(HALVES, LOCAL),
    "local steps, by speed": Arm(HALVES, LOCAL.with_shares(SHARES)),
}


def run(arguments: list[str]) -> int:
    """Measure what is not in the file yet, print the tables and write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks unequal")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--jobs", nargs="+", default=["transformer", "cnn"], choices=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="names of arms, or parts of them")
    options = parser.parse_args(arguments)
    parts = [part for part in ("speed", "loss") if getattr(options, part)] or ["speed", "loss"]
    arms = [name for name in ARMS if any(word in name for word in options.only)]
    known = read(PATH)
    cells = [
        {"part": part, "job": job, "arm": arm, "seed": seed}
        for part, seed in product(parts, options.seeds)
        for job in (options.jobs if part == "loss" else options.jobs[:1])
        for arm in arms
        if part == "speed" or arm != ALONE
    ]
    for cell in cells:
        if any(all(done[key] == value for key, value in cell.items()) for done in known):
            continue
        with Loopback(2) as ranks:
            found = collected(ranks, "benchmarks.unequal", tuple(cell.values()), cell["arm"], timeout=600.0)
        known.append(cell | found)
        with PATH.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        print(known[-1], flush=True)
    losses = loss_table(known)
    lines = speed_table(known) + (["", "Losses are of real training:", "", *losses] if losses else [])
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return 0


def speed_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: samples a second of each arm, and their part of the sum of both ranks alone."""
    found = {arm: [row["samples_s"] for row in rows if row["part"] == "speed" and row["arm"] == arm] for arm in ARMS}
    means = {arm: fmean(values) for arm, values in found.items() if values}
    if ALONE not in means:
        return ["Samples a second: not measured yet."]
    cells = [
        (arm, len(found[arm]), f"{mean:.1f}", f"{mean / means[ALONE]:.2f}", f"{min(found[arm]) / max(found[ALONE]):.2f}")
        for arm, mean in means.items()
    ]
    return markdown.table(("arm", "runs", "samples a second", "of the sum alone", "worst run"), cells, left=1)


def loss_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: held-out loss of each job and arm against equal batches in each step, paired by seed. No lines without losses."""
    losses = {(row["job"], row["arm"], row["seed"]): row["loss"] for row in rows if row["part"] == "loss"}
    cells = []
    for job, arm in dict.fromkeys((job, arm) for job, arm, _ in losses):
        reference = "local steps, equally many" if arm == "local steps, by speed" else EQUAL
        seeds = [seed for one, other, seed in losses if (one, other) == (job, arm) and (job, reference, seed) in losses]
        if arm == reference or not seeds:
            continue
        mean, width = interval([100 * (losses[job, arm, seed] / losses[job, reference, seed] - 1) for seed in seeds])
        cells.append((job, arm, reference, len(seeds), f"{mean:+.2f} ± {width:.2f}" if len(seeds) > 1 else f"{mean:+.2f}"))
    if not cells:
        return []
    return markdown.table(("job", "arm", "against", "seeds", "held-out loss, %"), cells, left=3)


# ---- on the ranks


class SleepsPerSample(torch.nn.Module):
    """A model on which each sample takes a given time. It sleeps between forward and backward, which takes twice a forward."""

    def __init__(self, model: torch.nn.Module, sample_ms: float) -> None:
        super().__init__()
        self.model, self.sample_s = model, sample_ms / 1e3

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        outputs: torch.Tensor = self.model(inputs)

        def rest(gradient: torch.Tensor) -> None:
            time.sleep(max(0.0, self.sample_s * len(inputs) - 3 * (time.perf_counter() - began)))

        outputs.register_hook(rest)
        return outputs


class Trainer:
    """One arm on one rank."""

    def __init__(self, job: MeasuredJob, arm: Arm, seed: int, rank: int, part: str) -> None:
        self.job, self.arm, self.rank, self.count = job, arm, rank, arm.batches[rank]
        self.model = job.make_model(seed)
        self.trained = SleepsPerSample(self.model, SAMPLE_MS[rank]) if part == "speed" else self.model
        self.optimizer = job.make_optimizer(self.model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.handle: gw.Handle | None = None
        self.number = 0
        if part == "speed" and arm.auto:
            self.count = HALVES[rank]
            self.handle = gw.parallelize(self.trained, self.optimizer)
        elif arm.schedule is not None:
            plan = gw.Uniform(gw.Identity(), schedule=arm.schedule)
            self.handle = gw.parallelize(self.trained, self.optimizer, plan=plan)

    def step(self, rate: float = 1.0) -> None:
        """Make a step on a batch of this rank's size."""
        self.job.batch_size = self.count
        for group, full in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = full * rate
        if self.handle is not None:
            self.handle.weight(self.count)
        self.job.loss(self.trained, self.job.batch(self.rank, 2, self.number)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def take_share(self) -> bool:
        """Take up the proposed part of the samples. Returns whether there is one. Raises RuntimeError where none will come."""
        assert self.handle is not None
        if self.handle.decision is None:
            return False
        if not self.handle.decision.batch_share:
            raise RuntimeError("auto proposes no parts of the samples: ranks share processors. Give each rank a processor.")
        parts = [round(BATCH * share) for share in self.handle.decision.batch_share]
        self.count = parts[0] if self.rank == 0 else BATCH - parts[0]
        return True

    @property
    def steps_for_one(self) -> float:
        """This rank's steps for one step of the fast rank."""
        schedule = self.arm.schedule
        return schedule.steps_of(self.rank) / schedule.every if isinstance(schedule, gw.LocalSteps) else 1.0


def speed_of(trainer: Trainer, rank: int) -> float:
    """Return the samples a second of both ranks."""
    import torch.distributed as dist

    while trainer.handle is not None and trainer.arm.auto and not trainer.take_share():
        trainer.step()
    for _ in range(round(EVERY * trainer.steps_for_one)):
        trainer.step()
    dist.barrier()
    began, steps = time.perf_counter(), round(SPEED_STEPS * trainer.steps_for_one)
    for _ in range(steps):
        trainer.step()
    found = torch.tensor([steps * trainer.count, time.perf_counter() - began], dtype=torch.float64)
    both = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(both, found)
    rows = [each.tolist() for each in both]
    if trainer.arm.schedule is None:
        return sum(samples / seconds for samples, seconds in rows)
    return float(sum(samples for samples, _ in rows) / max(seconds for _, seconds in rows))


def loss_of(trainer: Trainer) -> float:
    """Return the held-out loss after all samples."""
    schedule, batches = trainer.arm.schedule, trainer.arm.batches
    if isinstance(schedule, gw.LocalSteps):
        of_round = [schedule.steps_of(rank) for rank in range(2)]
        rounds = LOSS_SAMPLES // sum(steps * count for steps, count in zip(of_round, batches, strict=True))
        steps = rounds * of_round[trainer.rank]
    else:
        steps = LOSS_SAMPLES // sum(batches)
    for number in range(steps):
        trainer.step(trainer.job.rate(number, steps))
    trainer.model.eval()
    assert trainer.handle is not None
    trainer.handle.flush()
    return held_out(job_of(trainer.job.name, trainer.job.seed), trainer.model)


def _rank(part: str, job_name: str, arm: str, seed: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer(job_of(job_name, seed), ARMS[arm], seed, rank, part)
    found = {"samples_s": speed_of(trainer, rank)} if part == "speed" else {"loss": loss_of(trainer)}
    if trainer.handle is not None and part == "speed" and trainer.handle.decision is not None:
        found["share_of_first"] = trainer.count / BATCH
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    if trainer.handle is not None:
        trainer.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
