"""Compares the loss of FSDP2 with gradwire with that of FSDP2 alone: held-out, paired by seed, on 2 nodes over 200 Mb/s.

    python -m benchmarks fsdp2_losses [--job wide-transformer] [--seeds 3] [--steps 400] [--only ARM ..] [--table]

Auto measures the link, so the arms with auto train on emulated nodes (they need network namespaces). Bytes and losses count here,
and no times. Each training is one line of benchmarks/results/fsdp2_losses.jsonl, written when the training ends. A training that
is in the file is not repeated. `loss` is that of the exact weights at the end, `rounded` that of the weights which the last
forward gathers. Returns 1 if an arm with auto loses more than 1 % in the mean.
"""

import argparse
import json
import sys
import time
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from benchmarks import markdown
from benchmarks.accuracy.jobs import JOBS, MeasuredJob, job_of
from benchmarks.common import RESULTS, collected
from benchmarks.paired import interval
from gradwire.integrations import fsdp2
from gradwire.testbed import EmulatedCluster

PATH = RESULTS / "fsdp2_losses.jsonl"
LINK, MOST, HELD_OUT = "200mbit", 0.01, 16
KEYS = "job", "arm", "seed", "steps"
"""The fields that name a training."""
REFERENCE = "native"


class Arm(NamedTuple):
    """One way to train."""

    plan: Any = None
    """The argument of `compress`; None: FSDP2 alone."""
    parameters: gw.Spec | None = None


ARMS = {
    REFERENCE: Arm(),
    "auto": Arm("auto"),
    "auto, parameters in 8 bits": Arm("auto", gw.QSGD(bits=8)),
    "auto, parameters in float16": Arm("auto", gw.Cast()),
    "exact gradients, parameters in 8 bits": Arm(gw.Identity(), gw.QSGD(bits=8)),
    "4 bits, parameters in 8 bits": Arm(gw.QSGD(bits=4), gw.QSGD(bits=8)),
}


def run(arguments: list[str]) -> int:
    """Train what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fsdp2_losses")
    parser.add_argument("--job", default="wide-transformer", choices=list(JOBS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=list(ARMS), help="arms to train")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    for seed, arm in () if options.table else product(range(options.seeds), dict.fromkeys([REFERENCE, *options.only])):
        cell = dict(zip(KEYS, (options.job, arm, seed, options.steps), strict=True))
        if any(all(done[key] == cell[key] for key in KEYS) for done in known()):
            continue
        # FSDP2 alone is the same over any link
        with EmulatedCluster(2, 1, inter=None if arm == REFERENCE else LINK) as cluster:
            found = cell | collected(cluster, "benchmarks.fsdp2_losses", cell.values(), arm, timeout=3600.0)
        with PATH.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{options.job}, seed {seed}, {arm}: {found['loss']:.4f}", flush=True)
    rows, lost = summary(known())
    print("\n".join(markdown.table(("job", "steps", "arm", "seeds", "loss over native, %", "with rounded weights, %"), rows)))
    print("\n".join(lost))
    return int(bool(lost))


def known() -> list[dict[str, Any]]:
    """The trainings of the file."""
    return [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []


def summary(trainings: list[dict[str, Any]]) -> tuple[list[list[object]], list[str]]:
    """Rows for each job, number of steps and arm, and words for each arm with auto that loses too much."""
    rows: list[list[object]] = []
    lost = []
    for job, steps, arm in dict.fromkeys((each["job"], each["steps"], each["arm"]) for each in trainings):
        alike = [each for each in trainings if (each["job"], each["steps"]) == (job, steps)]
        native = {each["seed"]: each["loss"] for each in alike if each["arm"] == REFERENCE}
        own = [each for each in alike if each["arm"] == arm and each["seed"] in native]
        if arm == REFERENCE or not own:
            continue
        means = []
        for kind in ("loss", "rounded"):
            mean, width = interval([each[kind] / native[each["seed"]] - 1 for each in own])
            means.append((mean, f"{100 * mean:+.2f} ± {100 * width:.2f}"))
        rows.append([job, steps, arm, len(own), *(words for _, words in means)])
        if arm.startswith("auto") and means[0][0] > MOST:
            lost.append(f"{job}, {arm}: the loss is {100 * means[0][0]:.2f} % higher, wanted at most {100 * MOST:.0f} %")
    return rows, lost


# ---- on the ranks


def train(job: MeasuredJob, arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Train on this rank. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = job.make_model(seed)
    for block in model.get_submodule("blocks"):
        fully_shard(block)
    fully_shard(model)
    exchanges = None if arm.plan is None else fsdp2.compress(model, arm.plan, arm.parameters)
    optimizer = job.make_optimizer(model)
    rates, sent = [group["lr"] for group in optimizer.param_groups], 0.0
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.rate(step, steps)
        job.loss(model, job.batch(rank, world_size, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches, plain = job.held_out(HELD_OUT), job.make_model(seed)
    with torch.no_grad():  # before another forward, which leaves parameters gathered
        for own, exact in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(exact.full_tensor())  # type: ignore[attr-defined]
    rounded = evaluated(job, model, batches)
    decision = "" if exchanges is None else str(exchanges.decision or exchanges.describe())
    if exchanges is not None:
        sent = sum(each.wire_bytes for each in exchanges.stats().values())
        exchanges.close()
    return {"loss": evaluated(job, plain, batches), "rounded": rounded, "sent": sent, "decision": decision}


@torch.no_grad()
def evaluated(job: MeasuredJob, model: nn.Module, batches: list[Any]) -> float:
    """The mean loss on data that no rank trains on."""
    model.eval()
    return sum(job.loss(model, batch).item() for batch in batches) / len(batches)


def main(job: str, arm: str, seed: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    found = train(job_of(job, seed), ARMS[arm], seed, steps)
    if dist.get_rank() == 0:
        print(json.dumps(found | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
