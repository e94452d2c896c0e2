"""Compares the all-reduce of gloo with gradwire's own sums on wires, in turns in one run.

    python -m benchmarks sums [--ranks 2 4 8 16] [--links loopback 500mbit] [--kilobytes 64 1024 4096 25600] [--repeats 12]

Links: loopback, where each rank counts as a node of its own and uses TCP; memory, where all ranks are one node; unlimited or a
rate such as 500mbit between emulated nodes, which needs network namespaces. The time is that of the slowest rank, from all ranks
being ready; the processor's time is that of a mean rank, with all its threads. Ratios are of medians.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.common import RESULTS, collected, write
from gradwire.bench.loopback import Loopback
from gradwire.bench.runner import Network
from gradwire.testbed import EmulatedCluster, permission_problem

WAYS = ("gloo", "gradwire")
ON_ONE_MACHINE = ("loopback", "memory")


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/sums.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sums", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--links", nargs="+", default=["loopback", "memory", "500mbit"])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[64, 1024, 4096, 25600])
    parser.add_argument("--repeats", type=int, default=12, help="of each way")
    options = parser.parse_args(arguments)
    problem = permission_problem()
    cells: dict[str, Any] = {}
    for link in options.links:
        if problem and link not in ON_ONE_MACHINE:
            print(f"{link}: not measured, {problem}")
            continue
        for ranks in options.ranks:
            given = (link, options.repeats, *options.kilobytes)
            with _network(link, ranks) as network:
                found = collected(network, "benchmarks.sums", given, f"{link}, {ranks} ranks", timeout=600.0)
            for size, cell in found.items():
                cells[f"{link}, {ranks} ranks, {size}"] = cell
                times = [f"{way} {cell[way]['wall_ms']:.2f} ms ({cell[way]['cpu_ms']:.2f} of CPU)" for way in WAYS]
                print(f"{link}, {ranks} ranks, {size}: {', '.join(times)}; ratio {cell['ratio']:.2f}", flush=True)
    write(RESULTS / "sums.json", {"processors": len(os.sched_getaffinity(0)), "cells": cells})
    return 0


def _network(link: str, ranks: int) -> AbstractContextManager[Network]:
    if link in ON_ONE_MACHINE:
        return nullcontext(Loopback(ranks))
    return EmulatedCluster(ranks, 1, inter=None if link == "unlimited" else link)


def _rank(link: str, repeats: int, kilobytes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    from gradwire.collectives import AllReduce
    from gradwire.transport import Grid, Lanes, Link, Meter

    torch.set_num_threads(1)
    os.environ["GRADWIRE_SHARED_MEMORY"] = "on" if link == "memory" else "off"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    lanes = Lanes(None)
    lanes.open({}, torch.device("cpu"))
    lane = lanes.data[0]
    assert lane.link.wire is not None
    grid = Grid.even(size, 1, rank) if link == "loopback" else lanes.group.grid
    for each in kilobytes:
        flat = torch.empty(each * 256)
        sums = AllReduce(flat, grid)

        def by_gloo(link: Link, flat: torch.Tensor = flat) -> None:
            link.all_reduce(flat).wait()

        def by_wire(link: Link, sums: AllReduce = sums) -> None:
            sums.run(0, link, Meter(), None)

        calls: dict[str, Callable[[Link], None]] = dict(zip(WAYS, (by_gloo, by_wire), strict=True))
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(2 * repeats + 2):
            way = WAYS[(turn + turn // 2) % 2]
            flat.fill_(1.0)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            lane.submit(calls[way]).result()
            slowest = torch.tensor(time.perf_counter() - wall, dtype=torch.float64)
            spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
            assert bool((flat == size).all())
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if turn >= 2:
                taken[way].append((1e3 * slowest.item(), 1e3 * spent.item() / size))
        if rank == 0:
            cell: dict[str, Any] = {}
            for way, values in taken.items():
                wall_ms, cpu_ms = (statistics.median(column) for column in zip(*values, strict=True))
                cell[way] = {"wall_ms": wall_ms, "cpu_ms": cpu_ms}
            cell["ratio"] = cell["gloo"]["wall_ms"] / cell["gradwire"]["wall_ms"]
            print(json.dumps({f"{each} KB": cell}), flush=True)
    lanes.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
