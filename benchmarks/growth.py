"""Measures how the cost of a step grows: the time beyond the floor against tensors, elements and ranks. Writes docs/growth.md.

    python -m benchmarks growth [--curves tensors elements ranks] [--seconds 3] [--minutes 10] [--largest 200e6] [--anew]
                                [--out docs] [--simulated] [--unlike 16 64]

`--simulated` measures nothing: it only makes the simulated part anew, which takes some seconds. `--unlike` only prints the start
of so many ranks, with the same weights on all ranks, and with other ones on each: then rank 0's are sent, as DDP always does.

The floor is the same script without communication. It, 4 bits and DDP train in turns in the same processes, on loopback. Every
point takes `--seconds`, and at least LEAST_TURNS turns. 200 million elements need 6 GB of memory and 64 ranks 20 GB, without
DDP. Each point is written to benchmarks/results/growth.json when it is measured, and is not measured again, unless `--anew`.
After `--minutes` no point begins, and one that is under way ends without a result: the same command goes on with what is left.
1 if CPU time grows faster than the bytes and the messages that a rank sends, or sockets, messages or the start faster than with a
grid; 2 if points are left.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, collected, write
from benchmarks.growth_page import COSTS, LATER, page
from benchmarks.growth_simulated import COLUMNS as SIMULATED
from benchmarks.growth_simulated import OTHERS, bert_large, point
from benchmarks.growth_simulated import RANKS as SIMULATED_RANKS
from gradwire.bench.loopback import Loopback
from gradwire.core.files import write_whole
from gradwire.report.pictures import Panel, draw_lines

PATH = RESULTS / "growth.json"
TURN_STEPS, LEAST_TURNS, WARMUP_STEPS = 4, 3, 3
SMALL = 16 * 16
"""Elements of each tensor of the curve over tensors."""
TENSORS = (100, 200, 500, 1000, 2000, 5000)
ELEMENTS = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 200_000_000)
RANKS = (2, 4, 8, 16, 32, 64)
FEW, USUAL = 24, 6_000_000
"""Tensors, and elements of all of them, of the curves over something else."""
CURVES = ("tensors", "elements", "ranks")
MOST_DDP = 200_000_000
"""With more elements on all ranks together there is no turn of DDP: it needs a third copy of the weights, and gradients twice."""
DIRECT = 16
"""So many ranks exchange directly. More form a grid."""
NOISE = 0.1
"""A slope that is larger by less is not said to be larger."""


def run(arguments: list[str]) -> int:
    """Measure, print and write; 1 if a cost grows faster than what is sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=CURVES)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all points together")
    parser.add_argument("--largest", type=float, default=max(ELEMENTS))
    parser.add_argument("--anew", action="store_true", help="measure points that are there again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--simulated", action="store_true", help="only the simulated part, beside what was measured before")
    parser.add_argument("--unlike", type=int, nargs="+", default=[], metavar="RANKS", help="only print starts")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    for ranks in options.unlike:
        each = [measured(ranks, (FEW, USUAL), options.seconds, 60 * options.minutes, unlike) for unlike in (False, True)]
        print(f"{ranks} ranks, ms:", *(f"{found['start_ms']:.0f}" if found else "no result" for found in each), flush=True)
    if options.unlike:
        return 0
    before: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"curves": {}}
    if options.simulated:
        told = {"simulated": simulated(), "faster": faster_in(before["curves"])}
        write_whole(PATH, json.dumps(before | told, indent=1) + "\n")
        write_whole(options.out / "growth.md", page(json.loads(PATH.read_text())))
        return 0
    points = {curve: [] if options.anew and curve in options.curves else found for curve, found in before["curves"].items()}
    points = {curve: [each for each in points.get(curve, []) if set(COSTS) <= each.keys()] for curve in CURVES}
    wanted, late = list(left_to_do(points, options.curves, options.largest)), False
    for curve, ranks, shape in wanted:
        left = 60 * options.minutes - (time.monotonic() - began)
        late = late or left <= 0
        if late or (found := measured(ranks, shape, options.seconds, left)) is None:
            late = True
            continue
        points[curve] = sorted([*points[curve], found], key=lambda point: point[curve])
        _save(before, points, options.out, round(time.monotonic() - began))
        print(f"{curve} {found[curve]:,} after {time.monotonic() - began:.0f} s", flush=True)
    _save(before | {"simulated": simulated()}, points, options.out, round(time.monotonic() - began))
    faster = json.loads(PATH.read_text())["faster"]
    rest = len(list(left_to_do(points, options.curves, options.largest)))
    print("\n".join([*faster, f"written to {options.out / 'growth.md'}, {rest} points are left"]))
    return 2 if rest else int(bool(faster))


def left_to_do(
    points: Mapping[str, Sequence[Mapping[str, Any]]], curves: Sequence[str], largest: float
) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """The curve, the ranks and the shape of each point that is not there yet. A shape: tensors, and elements of all of them."""
    every: dict[str, list[tuple[int, tuple[int, int]]]] = {
        "tensors": [(2, (count, SMALL * count)) for count in TENSORS],
        "elements": [(2, (FEW, count)) for count in ELEMENTS if count <= largest],
        "ranks": [(ranks, (FEW, min(USUAL, int(largest)))) for ranks in RANKS],
    }
    for curve in curves:
        done = {(point["ranks"], (point["tensors"], point["elements"])) for point in points[curve]}
        yield from ((curve, *each) for each in every[curve] if each not in done)


def measured(ranks: int, shape: tuple[int, int], seconds: float, most_s: float, unlike: bool = False) -> dict[str, Any] | None:
    """One point; None if it takes longer than `most_s`. unlike: each rank begins with other weights."""
    order = json.dumps({"seconds": seconds, "shape": shape, "unlike": unlike})
    until = time.monotonic() + most_s
    try:
        return collected(Loopback(ranks), "benchmarks.growth", (order,), f"{ranks} ranks", timeout=most_s)["point"]
    except SystemExit:
        if time.monotonic() < until:
            raise
        return None


def _save(before: Mapping[str, Any], points: Mapping[str, list[dict[str, Any]]], out: Path, seconds: int) -> None:
    """Write the results, the picture and the page."""
    curves = {curve: found for curve, found in points.items() if found}
    slopes = {curve: slopes_of(curve, found) for curve, found in curves.items()}
    faster = faster_in(curves)
    result = {"cores": os.cpu_count(), "seconds": seconds, "curves": curves, "slopes": slopes, "faster": faster}
    write(PATH, result | {name: before[name] for name in ("simulated",) if name in before}, quiet=True)
    draw(out / "pictures" / "growth.png", curves)
    write_whole(out / "growth.md", page(json.loads(PATH.read_text())))


def simulated() -> dict[str, Any]:
    """The simulated part: points from 2 to 1,024 ranks, and their slopes."""
    profile = bert_large()
    points = [point(profile, ranks) for ranks in SIMULATED_RANKS]
    slopes = {cost: slope([each["ranks"] for each in points], [each[cost] for each in points]) for cost in SIMULATED}
    others = [point(profile, *shape) for shape in OTHERS]
    elements = sum(tensor.numel for tensor in profile.tensors)
    return {"points": points, "slopes": slopes, "tensors": len(profile.tensors), "elements": elements, "others": others}


def slopes_of(curve: str, points: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return for each cost the power of the curve's variable with which the cost grows."""
    return {cost: slope([p[curve] for p in points], [p.get(cost) or 0.0 for p in points]) for cost in (*COSTS, *LATER)}


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


def faster_in(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Words for each curve in which something grows faster than it may."""
    told = [(curve, words) for curve, found in curves.items() for words in too_fast(slopes_of(curve, found))]
    return [f"{curve}: {words}" for curve, words in [*told, *(("ranks", words) for words in too_many(curves.get("ranks", ())))]]


def too_many(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Words for costs that grow faster with the ranks than they may where there is a grid: sockets and messages as the square
    root of the ranks, and the start as the ranks, which share the cores."""
    slopes, told = slopes_of("ranks", [point for point in points if point["ranks"] > DIRECT]), []
    for cost, name, most in (
        ("sockets", "sockets grow", 0.5),
        ("messages", "messages grow", 0.5),
        ("start_ms", "the start grows", 1),
    ):
        if (found := slopes[cost]) is not None and found > most + NOISE:
            told.append(f"{name} with the power {found:.2f} beyond {DIRECT} ranks, and not {most:g}")
    return told


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
    (tensors, elements), rank, ranks = order["shape"], dist.get_rank(), dist.get_world_size()
    parallelize, plan = gw.parallelize, gw.QSGD(bits=4)  # names import their modules, which are no part of the start

    class Sums(torch.nn.Module):
        """The weighted sums of one vector, added up."""

        def __init__(self) -> None:
            super().__init__()
            value = rank * order["unlike"] / ranks
            self.weights = torch.nn.ParameterList(torch.full((elements // tensors,), value) for _ in range(tensors))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            total = self.weights[0] @ inputs
            for weight in self.weights[1:]:
                total = total + weight @ inputs
            return total

    def training(parallel: Callable[[Any], Any] | None) -> tuple[Callable[[], None], Any, float, int]:
        """A function that makes a step, what `parallel` made of the model, the seconds that it took, and the resident bytes
        before."""
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(elements // tensors, generator=torch.Generator().manual_seed(rank))
        dist.barrier()
        before, began = _resident_bytes(), time.perf_counter()
        made = parallel(model) if parallel is not None else None
        start_s = time.perf_counter() - began
        run = made if isinstance(made, torch.nn.Module) else model

        def step() -> None:
            run(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, made, start_s, before

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

    floor, *_ = training(None)
    turn(floor, WARMUP_STEPS)
    step, handle, start_s, before = training(lambda model: parallelize(model, plan=plan))
    turn(step, WARMUP_STEPS)
    threads, memory = len(os.listdir("/proc/self/task")), _resident_bytes() - before
    arms, ddp_start_s = [floor, step], 0.0
    if ranks * elements <= MOST_DDP:
        ddp, _, ddp_start_s, _ = training(torch.nn.parallel.DistributedDataParallel)
        turn(ddp, WARMUP_STEPS)
        arms.append(ddp)
    start = torch.tensor([start_s, ddp_start_s])
    dist.all_reduce(start, dist.ReduceOp.MAX)
    turns: list[list[tuple[float, float]]] = []
    deadline = time.monotonic() + order["seconds"]
    more = torch.ones(1)
    while more:
        turns.append([turn(arm, TURN_STEPS) for arm in arms])
        more.fill_(len(turns) < LEAST_TURNS or time.monotonic() < deadline)
        dist.broadcast(more, 0)
    floor_ms, step_ms, *ddp_ms = (float(np.median([ms for ms, _ in each])) for each in zip(*turns, strict=True))
    beyond = [with_it[0] - alone[0] for alone, with_it, *_ in turns]
    most = torch.tensor([*_messages_and_sockets(step, handle), threads, memory], dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    point = {
        **{"tensors": tensors, "elements": elements, "ranks": ranks, "turns": len(turns)},
        **{"floor_ms": floor_ms, "step_ms": step_ms, "beyond_ms": statistics.median(beyond)},
        "spread_ms": list(np.percentile(beyond, [10, 90])),
        "cpu_ms": statistics.median(with_it[1] - alone[1] for alone, with_it, *_ in turns),
        "sent_mb": handle.stats().wire_bytes / 1e6,
        **{"messages": int(most[0]), "sockets": int(most[1]), "start_ms": 1e3 * float(start[0])},
        **{"threads": int(most[2]), "memory_mb": int(most[3]) / 1e6},
        **{"ddp_step_ms": ddp_ms[0] if ddp_ms else None, "ddp_start_ms": 1e3 * float(start[1]) if ddp_ms else None},
    }
    handle.detach()
    if rank == 0:
        print(json.dumps({"point": point}))
    dist.destroy_process_group()


def _resident_bytes() -> int:
    """The memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _messages_and_sockets(step: Callable[[], None], handle: Any) -> tuple[int, int]:
    """The messages with gradients that this rank sends in a step, and the most connections of one lane."""
    from gradwire.transport import Wire

    counts, run = [0], Wire.run

    def counted(wire: Wire, operations: Any, meter: Any) -> None:
        counts[0] += operations.sends
        run(wire, operations, meter)

    Wire.run = counted  # type: ignore[method-assign]
    try:
        step()
    finally:
        Wire.run = run  # type: ignore[method-assign]
    lanes = handle.session.lanes
    return counts[0], max(lane.link.connections for lane in (lanes.control, *lanes.data))


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
