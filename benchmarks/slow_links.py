"""Finds by simulation how slow a link may be for each way to train. Writes docs/slow_links.md and its picture.

    python -m benchmarks slow_links [--nodes 2] [--out docs]

For a model of so many parameters, and each way, it looks for the slowest link at which a step takes at most 1.25 times as long as
its computation. Nothing is measured here; codec times come from benchmarks/results/compressors.json.
"""

import argparse
import json
from collections.abc import Mapping
from functools import cache, partial
from math import isnan, nan
from pathlib import Path

import gradwire as gw
from benchmarks.common import RESULTS
from benchmarks.markdown import table
from gradwire.core import Cluster, CodecCosts, Costs, Link, Profile, Spec, TensorInfo, TensorProfile
from gradwire.core.files import write_whole
from gradwire.core.schedules import Schedule
from gradwire.report.pictures import Panel, draw_lines
from gradwire.sim.timeline import simulate

PARAMETERS = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9)
COMPUTATION_S = (0.1, 1.0, 10.0)
"""Forward and backward of one step."""
WITHIN = 1.25
FEWEST_TENSORS, LARGEST_TENSOR, LATENCY_US = 200, 2_000_000, 100.0
SLOWEST_MBPS, FASTEST_MBPS = 0.01, 100_000.0
FOUR, TWO = gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))
WAYS: Mapping[str, tuple[Spec, Schedule]] = {
    "DDP": (gw.Identity(), gw.Backward()),
    "each step, 4 bits": (FOUR, gw.Backward()),
    "each step, 2 bits": (TWO, gw.Backward()),
    "every 30 steps, 4 bits": (FOUR, gw.LocalSteps(every=30)),
    "every 30 steps, streaming": (FOUR, gw.LocalSteps(every=30, fragments=4, delay=5, mixing=0.5)),
}
PAGE = """# How slow is your link?

Each way to train needs a link of some speed. [Local steps](local_steps.md) exchange every 30th step, say, and need the least. But
they learn something else than plain data-parallel training does. So take them where nothing else fits.

![How slow a link may be](pictures/slow_links.png)

How to read the picture: take the panel whose seconds are nearest to those of your step without communication. Find your model's
parameters, go up to the line of a way to train, and read the rate. On that link and on faster ones a step takes at most
{within:g} times as long as its computation. A line ends, and a table has "-", where even 100,000 Mb/s is too slow.

{tables}

- **Simulated**, not measured, by `python -m benchmarks slow_links`: {nodes} nodes, {latency:g} us of latency, at least {fewest}
  tensors of equal size. Codecs run on one CPU core, at the speeds in [compressors](compressors.md). Codecs on a GPU were not
  measured.
- For your own model use `gradwire profile` and `gradwire simulate`, which know its tensors.
- **Streaming** is `gw.LocalSteps(every=30, fragments=4, delay=5, mixing=0.5)` with 4 bits.
"""


def run(arguments: list[str]) -> int:
    """Simulate, draw and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks slow_links")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args(arguments)
    costs, panels, tables = measured_costs(), [], []
    heads = ["", *(f"{count / 1e6:,.0f} M" for count in PARAMETERS)]
    for seconds in COMPUTATION_S:
        curves = {way: [slowest_mbps(way, int(n), seconds, options.nodes, costs) for n in PARAMETERS] for way in WAYS}
        panels.append(Panel(f"{seconds:g} s of computation", [count / 1e6 for count in PARAMETERS], curves))
        rows = [(way, *map(_in_words, rates)) for way, rates in curves.items()]
        tables.append(f"Slowest link in Mb/s, {seconds:g} s of computation:\n\n" + "\n".join(table(heads, rows, left=1)))
    (options.out / "pictures").mkdir(parents=True, exist_ok=True)
    title = f"The slowest link on which a step takes {WITHIN:g} times its computation"
    draw_lines(options.out / "pictures" / "slow_links.png", title, panels, "millions of parameters", "Mb/s", True)
    words = {"within": WITHIN, "nodes": options.nodes, "fewest": FEWEST_TENSORS, "latency": LATENCY_US}
    write_whole(options.out / "slow_links.md", PAGE.format(**words, tables="\n\n".join(tables)))
    print(f"written to {options.out / 'slow_links.md'}")
    return 0


def slowest_mbps(way: str, parameters: int, seconds: float, nodes: int, costs: Costs) -> float:
    """The slowest rate at which a step takes WITHIN times its computation, to 1 %; NaN where none is fast enough."""
    step_us = partial(simulated_us, way, parameters, seconds, nodes, costs)
    goal, low, high = WITHIN * seconds * 1e6, SLOWEST_MBPS, FASTEST_MBPS
    if step_us(high) > goal:
        return nan
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if step_us(middle) <= goal else (middle, high)
    return high


def simulated_us(way: str, parameters: int, seconds: float, nodes: int, costs: Costs, mbps: float) -> float:
    """Microseconds of a step at this rate."""
    count = max(FEWEST_TENSORS, parameters // LARGEST_TENSOR)
    numel, each_us, names = parameters // count, seconds * 1e6 / count, [f"t{index}" for index in range(count)]
    rows = [
        TensorProfile(name=name, shape=(numel,), dtype="float32", backward_us=each_us * 2 / 3, forward_us=each_us / 3)
        for name in names
    ]
    profile = Profile(model="made up", batch=1, device="cpu", tensors=tuple(rows))
    plan = made_plan(way, tuple(names), numel, nodes)
    link = Link(LATENCY_US, mbps / 1000)
    return simulate(plan, profile, Cluster(nodes=nodes, ranks_per_node=1, intra=link, inter=link), costs).step_us


@cache
def made_plan(way: str, names: tuple[str, ...], numel: int, nodes: int) -> gw.Plan:
    """A bucket for each tensor."""
    spec, schedule = WAYS[way]
    tensors = [TensorInfo(name, (numel,), "float32") for name in names]
    return gw.Uniform(spec, schedule=schedule, bucket_bytes=4 * numel).plan(tensors, ranks=nodes)


def measured_costs() -> Costs:
    """Return the times of codecs on a CPU core, in proportion to the encoded bytes."""
    rows = json.loads((RESULTS / "compressors.json").read_text())["rows"]
    speeds: dict[str, Mapping[str, float]] = {
        row["spec"]: row for row in rows if row["megabytes"] == max(each["megabytes"] for each in rows)
    }
    return Costs(codecs=tuple(_codec(spec, speeds[repr(spec)]) for spec in (FOUR, TWO)))


def _in_words(rate: float) -> str:
    """Write a rate with three digits, or a dash.

    >>> [_in_words(rate) for rate in (1879.9, 17.456, 0.05521, nan)]
    ['1,880', '17.5', '0.0552', '-']
    """
    if isnan(rate):
        return "-"
    return f"{round(rate, -1 if rate < 10_000 else -2):,.0f}" if rate >= 1000 else f"{rate:.3g}"


def _codec(spec: Spec, speed: Mapping[str, float]) -> CodecCosts:
    encode, decode = (((0, 0.0), (2**34, 2**34 / speed[way] / 1000)) for way in ("encode_gbps", "decode_gbps"))
    return CodecCosts(spec=spec, device="cpu", encode=encode, decode=decode)
