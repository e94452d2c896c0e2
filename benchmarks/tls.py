"""Compares steps with encrypted connections with steps with plain ones, in turns in one run, over an emulated link.

    python -m benchmarks tls [--nodes 2] [--rate 500mbit] [--megabytes 25] [--turns 12] [--steps 5]

Needs network namespaces. Two handles of one job have the same model and plan, one with `tls=True`. They train in turns. A step's
time is that of the slowest rank, from all ranks being ready; the processor's time is that of a mean rank, with all its threads.
Ratios are of medians of turns.
"""

import argparse
import json
import os
import statistics
import sys
import time

from benchmarks.common import RESULTS, collected, write
from gradwire.testbed import EmulatedCluster, permission_problem

PLANS = ("Identity", "QSGD")
WAYS = ("plain", "tls")


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/tls.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tls", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--megabytes", type=float, default=25.0, help="of the model's gradients")
    parser.add_argument("--turns", type=int, default=12, help="of each way")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"tls: not measured, {problem}")
        return 0
    cells = {}
    with EmulatedCluster(options.nodes, 1, inter=options.rate) as cluster:
        for plan in PLANS:
            given = (plan, options.megabytes, options.turns, options.steps)
            cells[plan] = cell = collected(cluster, "benchmarks.tls", given, plan, timeout=1200.0)
            times = [f"{way} {cell[way]['step_ms']:.1f} ms ({cell[way]['cpu_ms']:.1f} of CPU)" for way in WAYS]
            print(f"{plan}: {', '.join(times)}; ratio {cell['ratio']:.3f}", flush=True)
    asked = {name: getattr(options, name) for name in ("nodes", "rate", "megabytes", "turns", "steps")}
    write(RESULTS / "tls.json", {"processors": len(os.sched_getaffinity(0)), **asked, "cells": cells})
    return 0


def _rank(plan: str, megabytes: float, turns: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    import gradwire as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width, layers = 1024, max(1, round(megabytes * 1e6 / 4 / 1024**2))
    spec = gw.Identity() if plan == "Identity" else gw.QSGD(bits=4)
    models = {way: torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))) for way in WAYS}
    handles = [gw.parallelize(models[way], plan=spec, tls=way == "tls") for way in WAYS]
    batch = torch.randn(32, width)
    step_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                models[way](batch).square().mean().backward()
            passed = torch.tensor([time.perf_counter() - began, time.process_time() - cpu], dtype=torch.float64) * 1e3 / steps
            slowest, total = passed[:1].clone(), passed[1:].clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if turn:  # the first warms up
                step_ms[way].append(slowest.item())
                cpu_ms[way].append(total.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        found: dict[str, object] = {
            way: {"step_ms": statistics.median(step_ms[way]), "cpu_ms": statistics.median(cpu_ms[way]), "all_ms": step_ms[way]}
            for way in WAYS
        }
        found["ratio"] = statistics.median(step_ms["tls"]) / statistics.median(step_ms["plain"])
        print(json.dumps(found), flush=True)
    for handle in handles:
        handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
