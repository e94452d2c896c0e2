"""Compares the exchange of one bucket with the wire: 32 MB of float32, 4 bits, 2 nodes, against wire_bytes * 8 / rate *
1514 / 1448.

    python -m benchmarks exchange [--rate 500mbit] [--repeats 15]

Needs network namespaces. The time is from the bucket being ready to its mean gradient being back, on the slower rank.
"""

import argparse
import json
import statistics
import sys
import time

from benchmarks.common import RESULTS, collected, write
from gradwire.testbed import EmulatedCluster, parse_rate, permission_problem

MEGABYTES = 32


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/exchange.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks exchange")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"exchange: not measured, {problem}")
        return 0
    with EmulatedCluster(2, 1, inter=options.rate) as cluster:
        result = collected(cluster, "benchmarks.exchange", (options.rate, options.repeats), "exchange", timeout=600.0)
    print(
        f"{MEGABYTES} MB bucket, 4 bits, {options.rate}: wire {result['wire_ms']:.1f} ms, taken {result['median_ms']:.1f} ms "
        f"(min {result['min_ms']:.1f}, max {result['max_ms']:.1f}): {result['ratio']:.3f} times the wire time"
    )
    write(RESULTS / "exchange.json", result)
    return 0


def _rank(rate: str, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    import gradwire as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numel = MEGABYTES * 2**20 // 4
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(numel))
    gradient = torch.randn(numel)
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    handed_on: list[float] = []
    # runs after gradwire's own hook, which copies the gradient and hands the bucket to the lanes
    model.weight.register_post_accumulate_grad_hook(lambda parameter: handed_on.append(time.perf_counter()))
    times = []
    for _ in range(repeats + 2):
        model.weight.grad = None
        loss = model.weight @ gradient
        dist.barrier()
        loss.backward()
        slowest = torch.tensor((time.perf_counter() - handed_on[-1]) * 1e3)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    wire_ms = handle.stats().wire_bytes * 8 / parse_rate(rate) * 1514 / 1448 * 1e3
    times = times[2:]
    if dist.get_rank() == 0:
        median = statistics.median(times)
        summary = {"rate": rate, "wire_ms": wire_ms, "median_ms": median, "min_ms": min(times), "max_ms": max(times)}
        print(json.dumps(summary | {"ratio": median / wire_ms}))
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
