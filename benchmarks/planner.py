"""Measures the time of planning, the predicted step of each method's plan, and the distance of joint from the best plan.

    python -m benchmarks planner [--repeats 3] [--scaling] [--cases DIR] [--selection DIR] [--random N [--first SEED]]

Two made-up models on 8 nodes of 8 ranks, one like BERT-base (199 tensors) and one of 314 tensors, with 4-bit QSGD on GPUs and
CPUs. Times of codecs are made up too: what is measured here is the planner. Wall-clock medians, and the least CPU time, which
says more on a busy machine; tables that many plans share, as the tree of options, are made before. Then small cases against
brute force. 1 if the joint planner takes more than 250 ms of CPU time.

--scaling: by tensors and by ranks. --random: so many random jobs, each method against the planner's promises; 1 if a promise is
broken. --cases: published profiles in DIR, `profiles/*.json` and codec times. --selection: ByteComp's selection for BERT-base
from the same DIR; 1 if it takes more than 100 ms of CPU time.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write
from benchmarks.planner_parts import cases, gaps, scaling, selections
from benchmarks.random_jobs import check_many
from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Link, Profile, TensorProfile
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.methods import METHODS as PLANNERS
from gradwire.planner.methods import make_plan

ALLOWED_MS, ALLOWED_SELECTION_MS = 250.0, 100.0
METHODS = tuple(PLANNERS)
"""All but Cupcake's search, which is stopped by the clock."""
CODECS = Costs(
    codecs=[
        CodecCosts(
            spec=QSGD(),
            device=device,
            encode=[(4 * 2**20, 100.0 * slow), (40 * 2**20, 400.0 * slow)],
            decode=[(4 * 2**20, 60.0 * slow), (40 * 2**20, 250.0 * slow)],
        )
        for device, slow in (("gpu", 1), ("cpu", 6))
    ]
)


def bert() -> Profile:
    """Twelve layers of width 768 with a vocabulary of 30,522, the embedding last."""
    wide, vector = (768, 768), (768,)
    layer = [vector, wide] * 4 + [vector, vector, (3072,), (3072, 768), vector, (768, 3072), vector, vector]
    shapes = [vector, wide, *layer * 12, vector, vector, (2, 768), (512, 768), (30522, 768)]
    return _profile("like BERT-base", shapes, 100.0)


def deep() -> Profile:
    """A hundred matrices of very different sizes, and two vectors to each."""
    rng = random.Random(0)
    shapes = [(int(3 * rng.lognormvariate(6, 1.5)) + 1, 64) if i % 3 == 0 else (256,) for i in range(314)]
    return _profile("314 tensors", shapes, 150.0)


def _profile(model: str, shapes: list[tuple[int, ...]], mean_us: float) -> Profile:
    rng = random.Random(0)
    tensors = [
        TensorProfile(name=f"t{i}", shape=shape, dtype="float32", backward_us=2 * mean_us * rng.random())
        for i, shape in enumerate(shapes)
    ]
    return Profile(model=model, batch=32, device="V100", tensors=tensors)


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/planner.json, or the file of the part that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--selection", type=Path)
    parser.add_argument("--random", type=int)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.random is not None:
        return check_random(chosen.first, chosen.random)
    if chosen.scaling:
        show("joint planning", "planner-scaling", scaling())
    if chosen.cases is not None:
        show("joint plans of published profiles, 8 nodes of 8 ranks", "planner-cases", list(cases(chosen.cases)))
    if chosen.selection is not None:
        selected = list(selections(chosen.selection, chosen.repeats))
        show("ByteComp's selection, BERT-base, 8 nodes of 8 ranks, 25 Gb/s", "planner-selection", selected)
        return int(any(each["cpu_ms"] > ALLOWED_SELECTION_MS for each in selected))
    if chosen.scaling or chosen.cases is not None:
        return 0
    rows = [
        row(profile, gbps, intra_gbps, method, chosen.repeats)
        for profile in (bert(), deep())
        for gbps, intra_gbps in ((100.0, 1200.0), (25.0, 100.0))
        for method in METHODS
    ]
    show("planning, 8 nodes of 8 ranks", "planner", rows)
    show("small cases beside brute force", "planner-gaps", gaps())
    return int(any(each["method"] == "joint" and each["planning_cpu_ms"] > ALLOWED_MS for each in rows))


def check_random(first: int, jobs: int) -> int:
    """Print counterexamples as they are found, and how many there are; 1 if there are any."""
    broken = without = 0
    for begin in range(first, first + jobs, 100):
        found = check_many(begin, min(100, first + jobs - begin))
        broken, without = broken + len(found["counterexamples"]), without + found["without_plan"]
        for seed, said in found["counterexamples"].items():
            print(f"seed {seed}: {'; '.join(said)}")
        done = begin - first + found["jobs"]
        print(f"{done} jobs from seed {first} on, {without} without any plan, {broken} with a counterexample", flush=True)
    return int(broken > 0)


def show(title: str, name: str, rows: list[dict[str, Any]]) -> None:
    """Print a table, and write it as benchmarks/results/NAME.json."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for each in rows:
        table.add_row(*(number(cell) if isinstance(cell, float) else str(cell) for cell in each.values()))
    Console().print(table)
    write(RESULTS / f"{name}.json", {"rows": rows})


def number(value: float) -> str:
    """Ratios need more places than times."""
    return f"{value:.4f}" if value < 2 else f"{value:.1f}"


def row(profile: Profile, gbps: float, intra_gbps: float, method: str, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    cluster = Cluster(nodes=8, ranks_per_node=8, intra=Link(5.0, intra_gbps), inter=Link(20.0, gbps))
    make_plan(PlanningJob(profile, cluster, CODECS, [QSGD()]), "ddp")
    made, cpu_ms = [], []
    for _ in range(repeats):
        began = time.process_time()
        made.append(make_plan(PlanningJob(profile, cluster, CODECS, [QSGD()]), method))
        cpu_ms.append((time.process_time() - began) * 1e3)
    prediction = made[0].plan.prediction
    assert prediction is not None
    return {
        "model": profile.model,
        "inter_gbps": gbps,
        "method": method,
        "buckets": len(made[0].plan.buckets),
        "planning_ms": statistics.median(each.planning_ms for each in made),
        "planning_cpu_ms": min(cpu_ms),
        "step_ms": prediction.step_us / 1e3,
        "ddp_ms": prediction.baseline_step_us / 1e3,
        "bound_ms": prediction.lower_bound_us / 1e3,
    }
