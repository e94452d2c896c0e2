"""Measures learning with every compressor: mean loss of the last 20 steps against plain DDP's, transformer and CNN, by seed.

    python -m benchmarks losses [--jobs transformer resnet] [--seeds 0 1 2] [--steps 300] [--only TopK]

Two ranks on plain loopback; a few methods at a time take turns step by step. What is measured goes to
benchmarks/results/losses.json at once, and is not measured again while it stands there (--again does), so that a long run can
be cut in pieces. DGC has the momentum of the job's optimizer, which then has none; a job whose optimizer keeps more than
momentum (AdamW) is trained with DGC(momentum=0).
"""

import json
import math
import statistics
import sys
from typing import Any

import torch

from benchmarks import paired
from benchmarks.catalogue import ENTRIES
from benchmarks.common import RESULTS

PATH = RESULTS / "losses.json"
WINDOW = 20
TOGETHER = 5
HALFWAY = "ddp, half the steps"
"""DDP at half the steps, which shows how fast the loss falls in the second half."""
PLAIN = ("ddp", HALFWAY, "ddp-powersgd")
BOUND = 0.03
"""Largest distance from DDP's loss at which a method with error feedback may end."""


def run(arguments: list[str]) -> int:
    """Measure what is missing and print the table; 1 if a method with error feedback is beyond the bound."""
    options = paired.parser_of("losses", seeds=3).parse_args(arguments)
    methods = [*PLAIN, *(f"gradwire:{entry.spec!r}" for entry in ENTRIES if entry.trains or "DGC" in repr(entry.spec))]
    chosen = [method for method in methods if any(part in method for part in options.only)]
    return report(paired.measure(PATH, options, chosen, train, {"ranks": 2, "window": WINDOW}, together=TOGETHER))


def report(finals: dict[str, Any]) -> int:
    """Print how far each is above DDP, over the seeds that both have."""
    feeding_back = {f"gradwire:{entry.spec!r}" for entry in ENTRIES if entry.spec.feedback}
    beyond = []
    for job, found in finals.items():
        for method in found if "ddp" in found else ():
            above = above_ddp(found, method)
            more = steps_for_one(found, method)
            print(
                f"{job}, {method}: {above:+.2%} against ddp ({len(found[method])} seeds)"
                + (f", {more:.2f} steps for one" if more is not None and method not in ("ddp", HALFWAY) else "")
            )
            if method in feeding_back and above > BOUND:
                beyond.append(f"{method} on {job}: {above:+.2%}")
    for each in beyond:
        print(f"more than {BOUND:.0%} above ddp: {each}")
    return 1 if beyond else 0


def above_ddp(found: dict[str, dict[str, float]], method: str) -> float:
    """Mean loss over that of ddp, less 1, over common seeds."""
    seeds = found[method].keys() & found["ddp"].keys()
    return sum(found[method][s] for s in seeds) / sum(found["ddp"][s] for s in seeds) - 1


def steps_for_one(found: dict[str, dict[str, float]], method: str) -> float | None:
    """About how many steps of a method bring the loss as far as one of DDP: where that falls as steps ** -p in the second half, a
    loss that is r times as high takes r ** (1 / p) times the steps. None where p was not measured."""
    if HALFWAY not in found:
        return None
    p = math.log2(1 + above_ddp(found, HALFWAY))
    return (1 + above_ddp(found, method)) ** (1 / p) if p > 0 else None


def train(job: str, seed: int, steps: int, methods: list[str]) -> dict[str, float]:
    """Mean loss over ranks and the last steps, by method."""
    curves = paired.on_ranks("benchmarks.losses", job, seed, steps, methods)
    ends = {method: steps // 2 if method == HALFWAY else steps for method in curves}
    return {method: statistics.mean(curve[ends[method] - WINDOW : ends[method]]) for method, curve in curves.items()}


def _rank(job_name: str, seed: int, steps: int, methods: list[str]) -> None:
    import torch.distributed as dist

    from gradwire.bench.jobs import make_job
    from gradwire.bench.methods import build

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    job = make_job(job_name, seed)
    running = {name: build("ddp" if name == HALFWAY else name, job, seed, dist.new_group(list(range(world)))) for name in methods}
    curves: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(steps):
        batch = job.batch(rank, world, step)
        for name, method in running.items():
            mean = torch.tensor(method.step(batch))
            dist.all_reduce(mean)
            curves[name].append(mean.item() / world)
    for method in running.values():
        method.check()
        method.close()
    if rank == 0:
        print(json.dumps(curves))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
