"""Measures how the cost of a step grows: the time beyond the floor against tensors, elements and ranks. Writes docs/growth.md.

    python -m benchmarks growth [--curves tensors elements ranks] [--seconds 8] [--largest 200e6] [--out docs] [--simulated]

`--simulated` measures nothing: it only makes the simulated part anew, which takes some seconds.

The floor is the same script without communication. Both train in turns in the same processes, on loopback, with 4 bits. Every
point takes `--seconds`, and at least LEAST_TURNS turns. 200 million elements need 6 GB of memory. What is measured goes to
benchmarks/results/growth.json. 1 if CPU time grows faster than the bytes and the messages that a rank sends.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, collected, write
from benchmarks.growth_page import page
from benchmarks.growth_simulated import COLUMNS as SIMULATED
from benchmarks.growth_simulated import RANKS as SIMULATED_RANKS
from benchmarks.growth_simulated import bert_large, point
from gradwire.bench.loopback import Loopback
from gradwire.core.files import write_whole
from gradwire.report.pictures import Panel, draw_lines

PATH = RESULTS / "growth.json"
TURN_STEPS, LEAST_TURNS, WARMUP_STEPS = 4, 3, 3
SMALL = 16 * 16
"""Elements of each tensor of the curve over tensors."""
TENSORS = (100, 200, 500, 1000, 2000, 5000)
ELEMENTS = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 200_000_000)
RANKS = (2, 4, 8, 16)
FEW, USUAL = 24, 6_000_000
"""Tensors, and elements of all of them, of the curves over something else."""
CURVES = ("tensors", "elements", "ranks")
COSTS = ("beyond_ms", "cpu_ms", "sent_mb", "messages")
NOISE = 0.1
"""A slope that is larger by less is not said to be larger."""


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if a cost grows faster than what is sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=CURVES)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--largest", type=float, default=max(ELEMENTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--simulated", action="store_true", help="only the simulated part, beside what was measured before")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    if options.simulated:
        before = json.loads(PATH.read_text())
        write_whole(PATH, json.dumps(before | {"simulated": simulated()}, indent=1) + "\n")
        write_whole(options.out / "growth.md", page(json.loads(PATH.read_text())))
        return 0
    points: dict[str, list[dict[str, Any]]] = {}
    for curve in options.curves:
        points[curve] = measured(curve, options.seconds, options.largest)
        print(f"{curve}: {len(points[curve])} points after {time.monotonic() - began:.0f} s", flush=True)
    slopes = {curve: slopes_of(curve, found) for curve, found in points.items()}
    faster = [f"{curve}: {words}" for curve, found in slopes.items() for words in too_fast(found)]
    seconds = round(time.monotonic() - began)
    result = {"cores": os.cpu_count(), "seconds": seconds, "curves": points, "slopes": slopes, "faster": faster}
    write(PATH, result | {"simulated": simulated()})
    draw(options.out / "pictures" / "growth.png", points)
    write_whole(options.out / "growth.md", page(json.loads(PATH.read_text())))
    print("\n".join([*faster, f"written to {options.out / 'growth.md'}, after {seconds} s"]))
    return int(bool(faster))


def measured(curve: str, seconds: float, largest: float) -> list[dict[str, Any]]:
    """The points of a curve, in order."""
    by_ranks: dict[int, list[tuple[int, int]]] = {
        "tensors": {2: [(count, SMALL * count) for count in TENSORS]},
        "elements": {2: [(FEW, count) for count in ELEMENTS if count <= largest]},
        "ranks": {ranks: [(FEW, min(USUAL, int(largest)))] for ranks in RANKS},
    }[curve]
    found: list[dict[str, Any]] = []
    for ranks, shapes in by_ranks.items():
        order = json.dumps({"seconds": seconds, "shapes": shapes})
        found += collected(Loopback(ranks), "benchmarks.growth", (order,), f"{ranks} ranks", timeout=900.0)["points"]
    return found


def simulated() -> dict[str, Any]:
    """The simulated part: points from 2 to 1,024 ranks, and their slopes."""
    profile = bert_large()
    points = [point(profile, ranks) for ranks in SIMULATED_RANKS]
    slopes = {cost: slope([each["ranks"] for each in points], [each[cost] for each in points]) for cost in SIMULATED}
    elements = sum(tensor.numel for tensor in profile.tensors)
    return {"points": points, "slopes": slopes, "tensors": len(profile.tensors), "elements": elements}


def slopes_of(curve: str, points: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return for each cost the power of the curve's variable with which the cost grows."""
    return {cost: slope([p[curve] for p in points], [p[cost] for p in points]) for cost in COSTS}


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of the line through the points' logarithms, by least squares. Points that are not above 0 are
    left out; None for fewer than two others.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 3)
    2.0
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
    if len(pairs) < 2:
        return None
    return float(np.polyfit(*np.log(np.transpose(pairs)), 1)[0])


def too_fast(slopes: Mapping[str, float | None]) -> list[str]:
    """Words if a rank's CPU time grows faster than the bytes and the messages that it sends."""
    moved = max(slopes["sent_mb"] or 0.0, slopes["messages"] or 0.0)
    if (cpu := slopes["cpu_ms"]) is not None and cpu > moved + NOISE:
        return [f"CPU time grows with the power {cpu:.2f}, and what is sent with {moved:.2f}"]
    return []


def draw(path: Path, points: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """One panel a curve."""
    labels = {"beyond_ms": "step", "cpu_ms": "CPU time of a rank"}
    panels = []
    for curve, found in points.items():
        unit = 1e6 if curve == "elements" else 1
        curves = {label: [max(point[cost], 0.01) for point in found] for cost, label in labels.items()}
        title = "millions of elements" if curve == "elements" else curve
        panels.append(Panel(title, [point[curve] / unit for point in found], curves))
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_lines(path, "Beyond the floor, 4 bits, loopback", panels, "", "ms a step", logarithmic=True)


def _rank(order: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import gradwire as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def training(tensors: int, elements: int, parallel: bool) -> tuple[Any, Any]:
        """A function that makes a step, and the handle."""
        model = torch.nn.Module()
        size = elements // tensors
        model.weights = torch.nn.ParameterList(torch.zeros(size) for _ in range(tensors))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, plan=gw.QSGD(bits=4)) if parallel else None
        inputs = torch.randn(size, generator=torch.Generator().manual_seed(rank))

        def step() -> None:
            total = model.weights[0] @ inputs
            for weight in model.weights[1:]:
                total = total + weight @ inputs
            total.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, handle

    def turn(step: Any, steps: int) -> tuple[float, float]:
        """Milliseconds and CPU milliseconds of a step, on the mean rank."""
        dist.barrier()
        began, cpu, times = time.perf_counter(), time.process_time(), []
        for _ in range(steps):
            step()
            times.append(time.perf_counter() - began - sum(times))
        found = torch.tensor([statistics.median(times), (time.process_time() - cpu) / steps], dtype=torch.float64)
        dist.all_reduce(found)
        return tuple((1e3 * found / ranks).tolist())  # type: ignore[return-value]

    points = []
    for tensors, elements in order["shapes"]:
        (floor, _), (step, handle) = (training(tensors, elements, parallel) for parallel in (False, True))
        turn(floor, WARMUP_STEPS), turn(step, WARMUP_STEPS)
        turns: list[tuple[tuple[float, float], tuple[float, float]]] = []
        deadline = time.monotonic() + order["seconds"]
        more = torch.ones(1)
        while more:
            turns.append((turn(floor, TURN_STEPS), turn(step, TURN_STEPS)))
            more.fill_(len(turns) < LEAST_TURNS or time.monotonic() < deadline)
            dist.broadcast(more, 0)
        (floor_ms, _), (step_ms, _) = (np.median(each, 0) for each in zip(*turns, strict=True))
        beyond = [with_it[0] - alone[0] for alone, with_it in turns]
        stats = handle.stats()
        points.append(
            {
                **{"tensors": tensors, "elements": elements, "ranks": ranks, "turns": len(turns)},
                **{"floor_ms": floor_ms, "step_ms": step_ms, "beyond_ms": statistics.median(beyond)},
                "spread_ms": list(np.percentile(beyond, [10, 90])),
                "cpu_ms": statistics.median(with_it[1] - alone[1] for alone, with_it in turns),
                "sent_mb": stats.wire_bytes / 1e6,
                "messages": sum(2 * (ranks - 1) * bucket.chunks for bucket in stats.buckets),
            }
        )
        handle.detach()
        del floor, step, handle
    if rank == 0:
        print(json.dumps({"points": points}))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
