"""What the exchange between islands adds to a step: two islands of two ranks, FSDP2 inside, a slow link between.

    python -m benchmarks islands [--rate 10mbit] [--every 30 100] [--periods 3]

Needs network namespaces. An island is an emulated node, whose ranks reach each other without a limit. They train the bench's
transformer with `gw.islands` and 4 bits. The mean step of whole periods is compared with the mean step that exchanges nothing
between islands, of the same periods. The times are those of the rank that is slowest over a whole period.
"""

import argparse
import json
import sys
import time

from benchmarks import markdown
from benchmarks.common import RESULTS, collected, write
from gradwire.testbed import EmulatedCluster, permission_problem

JOB = "transformer"


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/islands.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks islands", description=__doc__)
    parser.add_argument("--rate", default="10mbit", help="of each island's link to the other")
    parser.add_argument("--every", type=int, nargs="+", default=[30, 100], help="steps from one exchange to the next")
    parser.add_argument("--periods", type=int, default=3)
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"islands: not measured, {problem}")
        return 0
    cells = []
    with EmulatedCluster(2, 2, inter=options.rate) as cluster:
        for every in options.every:
            found = collected(cluster, "benchmarks.islands", (every, options.periods), f"every {every}", timeout=1800.0)
            cells.append({"every": every, **found})
    write(RESULTS / "islands.json", {"rate": options.rate, "periods": options.periods, "cells": cells})
    head = ("every", "a step without the exchange, ms", "the step with it, ms", "mean step, ms", "ratio")
    columns = ("every", "apart_ms", "exchange_ms", "mean_ms", "ratio")
    print("\n".join(markdown.table(head, [[cell[name] for name in columns] for cell in cells], left=0)))
    return 0


def _rank(every: int, periods: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import gradwire as gw
    from gradwire.bench.jobs import make_job

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("between", "inside"))
    job = make_job(JOB)
    model = job.make_model(0)
    fully_shard(model, mesh=mesh["inside"])
    optimizer = job.make_optimizer(model)
    made = gw.islands(model, optimizer, mesh, gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=every)))
    times = []
    for number in range((1 + periods) * every):  # the first period is a warm-up
        began = time.perf_counter()
        job.loss(model, job.batch(rank, world, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    of_periods = torch.tensor(times[every:], dtype=torch.float64).reshape(periods, every)
    slowest = torch.stack([of_periods[:, :-1].mean(1), of_periods[:, -1], of_periods.mean(1)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    apart, exchange, mean = slowest.mean(1).tolist()
    if rank == 0:
        found = {"apart_ms": apart, "exchange_ms": exchange, "mean_ms": mean}
        print(json.dumps({**{name: round(1e3 * value, 1) for name, value in found.items()}, "ratio": round(mean / apart, 3)}))
    made.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]))
