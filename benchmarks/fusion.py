"""Measures the time of the exact fusion search, and its gain over the rules that others use.

    python -m benchmarks fusion [--repeats 5] [--profiles FOLDER] [--seconds 5]

Three regimes, each at 314 tensors (ResNet-101) and at 10,000. FOLDER may hold measured profiles as JSON with `tensors:
[[name, float32 elements, microseconds of backward], ...]`: each is fused at the same costs, and compared with the rules
and with Cupcake's own search, which gets so many seconds. Without --profiles the results of earlier profiles stay. Times of
searches are CPU time. 1 if 314 tensors take more than 10 ms or 10,000 more than 100 ms.
"""

import argparse
import json
import random
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write
from benchmarks.papers.cupcake import algorithm_1
from benchmarks.papers.strawmen import compare, layer_names
from gradwire.costs.prices import AffineCost
from gradwire.planner.fusion import optimal
from gradwire.planner.partition import FusionCosts

ALLOWED_MS = {314: 10.0, 10_000: 100.0}
BACKWARD_US = 120e3
TOTAL_BYTES = 178e6
"""Bytes of all tensors together, about ResNet-101's."""


class Regime(NamedTuple):
    """The costs of a bucket. Sizes of tensors vary by `spread` (0: all alike). Link time is `link` times backward."""

    encode_us: float
    exchange_us: float
    link: float
    spread: float


REGIMES = {
    "few large buckets pay": Regime(encode_us=390, exchange_us=1000, link=0.6, spread=2.0),
    "in between": Regime(encode_us=20, exchange_us=30, link=1.0, spread=1.0),
    "many small buckets pay": Regime(encode_us=0.01, exchange_us=0.02, link=1.0, spread=0.01),
}


def case(regime: Regime, tensors: int) -> tuple[list[float], list[int], tuple[float, float], tuple[float, float]]:
    """Times, sizes, encode and exchange."""
    rng = random.Random(0)
    weights = [rng.lognormvariate(0, regime.spread) for _ in range(tensors)]
    sizes = [int(TOTAL_BYTES * weight / sum(weights)) for weight in weights]
    times = [BACKWARD_US / tensors * rng.lognormvariate(0, regime.spread / 2) for _ in range(tensors)]
    encode_per_byte = 1e-5
    per_byte = regime.link * (sum(times) + encode_per_byte * sum(sizes)) / sum(sizes)
    return times, sizes, (regime.encode_us, encode_per_byte), (regime.exchange_us, per_byte)


def timed(repeats: int, *arguments: Any) -> tuple[Any, float]:
    """Return the result of `optimal`, and its median CPU time in milliseconds. It runs on one thread and waits for nothing."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        found = optimal(*arguments)
        taken.append((time.process_time() - start) * 1e3)
    return found, statistics.median(taken)


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/fusion.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fusion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    rows = [row for count in ALLOWED_MS for row in regimes(count, options.repeats)]
    show("the exact search", rows)
    path = RESULTS / "fusion.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {key: value for key, value in known.items() if key != "made"} | {"regimes": rows}
    if options.profiles:
        found = [profile(path, options.repeats, options.seconds) for path in sorted(options.profiles.glob("*.json"))]
        for each in found:
            show(f"{each['model']}, {each['tensors']} tensors: DGC at 1 %, 8 ranks, 50 Gb/s", each["rules"])
        result["profiles"] = found
    write(path, result)
    slow = [row for row in rows if max(row["ms"], row["with_decode_ms"]) > ALLOWED_MS[row["tensors"]]]
    for row in slow:
        print(f"too slow: {row}")
    return 1 if slow else 0


def regimes(count: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each regime."""
    rows = []
    for name, regime in REGIMES.items():
        given = case(regime, count)
        found, taken_ms = timed(repeats, *given)
        _, decode_ms = timed(repeats, *given, (regime.encode_us, 1e-5))
        rows.append(
            {"regime": name, "tensors": count, "buckets": len(found.boundaries), "ms": taken_ms, "with_decode_ms": decode_ms}
        )
    return rows


def profile(path: Path, repeats: int, seconds: float) -> dict[str, Any]:
    """A measured model: step times of the best fusion, the rules and Cupcake's search."""
    content = json.loads(path.read_text())
    names, elements, times = zip(*content["tensors"], strict=True)
    sizes = [4 * numel for numel in elements]
    # 1 % of the gradient from each of 7 others at 50 Gb/s, as indices and values
    encode, exchange, plain = (390.0, 1e-5), (50.0, 7 * 0.02 * 8 / 50e3), (50.0, 2 * 7 / 8 * 8 / 50e3)
    costs = FusionCosts(encode=encode, exchange=exchange)
    found, taken_ms = timed(repeats, times, sizes, encode, exchange)
    rules = [{"rule": "best", "buckets": len(found.boundaries), "step_ms": found.step_us / 1e3, "search_ms": taken_ms}]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = algorithm_1(times, sizes, costs, seconds=seconds)
    searched_ms = (time.process_time() - start) * 1e3
    rules.append(
        {
            "rule": "Cupcake's Algorithm 1" + ("" if search.finished else ", not finished"),
            "buckets": len(search.fusion.boundaries),
            "step_ms": search.fusion.step_us / 1e3,
            "search_ms": searched_ms,
        }
    )
    for rule, rival in compare(times, sizes, costs, layer_names(names), AffineCost(*plain)).items():
        rules.append({"rule": rule, "buckets": len(rival.boundaries), "step_ms": rival.step_us / 1e3, "search_ms": None})
    return {"model": content["model"], "tensors": len(names), "rules": rules}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        cells = [f"{cell:.2f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row.values()]
        table.add_row(*cells)
    Console().print(table)
