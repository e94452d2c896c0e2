"""Compares one exchange between ranks of a node through shared memory and over TCP on loopback, in turns in one run.

    python -m benchmarks shared_memory [--ranks 2 4] [--megabytes 1 16] [--turns 24]

`4 bits` is the two-phase exchange, `exact` a reduce-scatter and an all-gather of float32, as hierarchical plans have in a node,
and `all-reduce` what `gw.Identity()` does on one node: gloo's and the one through memory.
Of each turn of several exchanges: the time of the slowest rank, and the processor's seconds of all ranks with all their threads.
The ratios are medians over pairs of turns, one of each kind.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from msgspec.structs import replace

from benchmarks.common import RESULTS, collected, write
from gradwire.bench.loopback import Loopback

SWITCH = "GRADWIRE_SHARED_MEMORY"
WAYS = {"TCP": "off", "memory": "on"}
TURN_MEGABYTES = 32
"""So much is exchanged in a turn."""


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/shared_memory.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks shared_memory", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--turns", type=int, default=24, help="of each way")
    options = parser.parse_args(arguments)
    cells = {}
    for ranks in options.ranks:
        given = (options.turns, *options.megabytes)
        found = collected(Loopback(ranks), "benchmarks.shared_memory", given, f"{ranks} ranks", timeout=300.0)
        cells |= {f"{ranks} ranks, {name}": cell for name, cell in found.items()}
    for name, cell in cells.items():
        times = {way: f"{cell[way]['wall_ms']:.2f} ms, {cell[way]['cpu_ms']:.2f} ms of CPU" for way in WAYS}
        print(
            f"{name}: TCP {times['TCP']}; memory {times['memory']}; "
            f"{cell['wall_ratio']:.2f} times as fast, {cell['cpu_ratio']:.2f} times less CPU"
        )
    write(RESULTS / "shared_memory.json", {"processors": len(os.sched_getaffinity(0)), "cells": cells})
    return 0


def _rank(turns: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    import gradwire as gw
    from gradwire.core import TensorInfo

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in sizes:
        infos = [TensorInfo("gradient", (size * 2**18,), "float32")]
        exact = _sums_in_parts(gw.Uniform(gw.Identity()).plan(infos, dist.get_world_size()))
        plans = {"4 bits": gw.QSGD(bits=4), "exact": exact, "all-reduce": gw.Identity()}
        for name, plan in plans.items():
            tensors = {way: {"gradient": torch.randn(size * 2**18)} for way in WAYS}
            exchanges = {}
            for way, switch in WAYS.items():
                os.environ[SWITCH] = switch
                exchanges[way] = gw.Exchange(tensors[way], plan=plan)
                wires = [lane.link.wire for lane in exchanges[way].lanes.data]
                shares = [None if wire is None else wire.shared_with for wire in wires]
                assert all(each is not None and bool(each) == (way == "memory") for each in shares), (way, shares)
                pieces = [chunk for bucket in exchanges[way].buckets for chunk in bucket.chunks]
                assert all(name == "all-reduce" or chunk.runs_in_c for chunk in pieces)
            count = max(1, TURN_MEGABYTES // size)
            seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for turn in range(2 * turns + 4):
                way = list(WAYS)[turn % 2]
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(count):
                    exchanges[way].average_()
                taken = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
                slowest = taken[:1].clone()
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                dist.all_reduce(taken)
                if turn >= 4:
                    seconds[way].append([slowest.item() / count, taken[1].item() / count])
            for exchange in exchanges.values():
                exchange.close()
            if dist.get_rank() == 0:
                print(json.dumps({f"{size} MB, {name}": _summary(seconds)}), flush=True)
    dist.destroy_process_group()


def _sums_in_parts(plan: Any) -> Any:
    """This plan of one bucket, which is summed by reduce-scatter and all-gather."""
    (bucket,) = plan.buckets
    made = replace(bucket, option=("reducescatter:inter", "allgather:inter"))
    return replace(plan, buckets=(made,), launch=tuple((0, task) for task in made.link_tasks))


def _summary(seconds: dict[str, list[list[float]]]) -> dict[str, object]:
    cell: dict[str, object] = {}
    for at, what in enumerate(("wall", "cpu")):
        pairs = zip(seconds["TCP"], seconds["memory"], strict=True)
        ratios = sorted(tcp[at] / memory[at] for tcp, memory in pairs)
        cell[f"{what}_ratio"] = statistics.median(ratios)
        cell[f"{what}_ratio_quartiles"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    for way, turns in seconds.items():
        medians = (1e3 * statistics.median(turn[at] for turn in turns) for at in (0, 1))
        cell[way] = dict(zip(("wall_ms", "cpu_ms"), medians, strict=True)) | {"turns": len(turns)}
    return cell


if __name__ == "__main__":
    _rank(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
