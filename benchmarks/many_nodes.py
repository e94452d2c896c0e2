"""Steps on 2 to 32 nodes: DDP, exact sums, fixed specs, and plan="auto".

    python -m benchmarks many_nodes [--nodes 2 4 8 16 32] [--links 100mbit] [--jobs transformer] [--steps 8] [--again]

Computation is a timed sleep, so many nodes fit on few processors. Sockets, codecs and memory are real. The methods of a cell run
in turns, as many together as fit into memory. Results go to benchmarks/results/many_nodes/NODES-JOB-LINK.json after each cell;
what is there is not measured again, unless --again. The tables go to docs/many_nodes.md. Needs network namespaces.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.markdown import table
from benchmarks.sleeping_cells import (
    add_options,
    failures,
    found_by,
    is_there,
    milliseconds,
    ratio,
    request_of,
    results_in,
    status_of,
)
from gradwire.bench.jobs import make_job
from gradwire.bench.names import UNLIMITED
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem, gbps_of, run_bench
from gradwire.core.files import write_whole

FOLDER = RESULTS / "many_nodes"
PAGE = Path(__file__).parents[1] / "docs" / "many_nodes.md"
NODES, LINKS, JOBS = (2, 4, 8, 16, 32), ("100mbit", "500mbit", "1000mbit", UNLIMITED), ("transformer", "bert")
SIZES = {
    "transformer": "the bench's transformer has 6.09 million parameters",
    "bert": "the one with BERT-medium's layers 25.4 million",
}
FLOOR, DDP, EXACT, BITS, AUTO = "no communication", "DDP", "auto, exact", "4 bits", "auto"
WEIGHTED = "gradwire:ErrorFeedback(QSGD(bits={}, scale='ls', levels='lloyd'), weights=0.98, warm_up_steps=20)"
COPIES = 4
"""Of a model in a method: weights, gradients, buckets, and what codecs and sums need."""
PART_OF_MEMORY = 0.5
TEXT = """# Steps on many machines

How long a step takes on {least} to {most} machines, one rank each. {jobs}
In each step DDP sends and receives nearly twice the gradients' bytes on each machine.

{tables}

- **Emulated** on one machine with {processors} processors, and measured by `python -m benchmarks many_nodes`. Computation is a
  timed sleep. Median steps of rank means, in ms.
- **fixed spec** is the smallest one that "safe" may use on so many ranks: {fixed}.
  The weights are [those of elements](glossary.md).
- **over DDP** is DDP's step over auto's. **exact over DDP** is DDP's step over that of `accuracy="exact"`.
- **possible** is the largest of three. Computation: it is a sleep, so codecs run beside it. Forward, in which nothing can be
  sent, and the plan's bytes at the link's rate. The processor time of all ranks over {processors} processors. **of possible** is
  that over auto's step.
- **predicted** is auto's own prediction over its step. **over the best** is auto's step over the shortest in its row.

What auto chose:

{chosen}

For steps of computing jobs on 2 and 4 machines: [the matrix](matrix.md). For steps between sites: [far links](far_links.md).
"""


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write the page; 1 where nothing can be emulated, and where a method failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks many_nodes")
    parser.add_argument("--nodes", nargs="+", type=int, default=NODES)
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--jobs", nargs="+", default=JOBS)
    add_options(parser, 8)
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    failed: list[str] = []
    for nodes, job, link in ((nodes, job, link) for nodes in options.nodes for job in options.jobs for link in options.links):
        path = FOLDER / f"{nodes}-{job}-{link}.json"
        if not options.again and is_there(path, methods_of(nodes)):
            continue
        found = measured(nodes, job, link, options.steps)
        failed += failures(path.stem, found)
        about = {"nodes": nodes, "job": job, "link": link, "steps": options.steps, "processors": os.cpu_count()}
        write(path, about | {"methods": found}, quiet=True)
    results = sorted(results_in(FOLDER), key=lambda each: (JOBS.index(each["job"]), LINKS.index(each["link"]), each["nodes"]))
    page = page_of(results)
    print(page)
    write_whole(PAGE, page)
    return status_of(failed)


def methods_of(nodes: int) -> dict[str, str]:
    """The names of the methods in tables and in the bench."""
    bits = fixed_bits(nodes)
    fixed = WEIGHTED.format(bits) if bits < 8 else "gradwire:qsgd8"
    names = ("floor", "ddp", "gradwire:auto-exact", "gradwire:qsgd4", fixed, "gradwire:auto")
    return dict(zip((FLOOR, DDP, EXACT, BITS, "fixed spec", AUTO), names, strict=True))


def fixed_bits(nodes: int) -> int:
    """The bits of the smallest spec that "safe" may use on so many ranks. Those of less than 8 have weights."""
    return 2 if nodes <= 4 else 3 if nodes <= 16 else 8


def measured(nodes: int, job: str, link: str, steps: int) -> dict[str, dict[str, Any]]:
    """What is kept of each method. As many methods as fit into memory take turns."""
    methods = methods_of(nodes)
    of_method = nodes * COPIES * sum(each.nbytes for each in make_job(job).make_model(0).parameters())
    together = max(1, int(PART_OF_MEMORY * psutil.virtual_memory().available / of_method))
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(methods), together):
        names = list(methods)[first : first + together]
        request = request_of(job, link, [methods[name] for name in names], nodes, steps, (steps + 1) // 2)
        done = run_bench(request, None, ProgressView(Console(stderr=True)))
        found |= {name: found_by(done.cell(job, link, methods[name])) for name in names}
    return found


def page_of(results: Sequence[dict[str, Any]]) -> str:
    """The page in docs."""
    nodes = sorted({each["nodes"] for each in results})
    sizes = ", ".join(SIZES[job] for job in JOBS if any(each["job"] == job for each in results))
    by_bits = [(fixed_bits(count), count) for count in nodes]
    fixed = [f"{bits} bits{' with weights' if bits < 8 else ''} on {count}" for bits, count in by_bits]
    return TEXT.format(
        least=nodes[0],
        most=nodes[-1],
        jobs=f"{sizes[:1].upper()}{sizes[1:]}.",
        fixed=", ".join(fixed),
        processors=results[0]["processors"],
        tables="\n".join(tables_of(results)),
        chosen="\n".join(chosen_of(results)),
    )


def tables_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each job and link: the median steps by the number of nodes."""
    lines: list[str] = []
    names = list(methods_of(NODES[0]))
    more = ("over DDP", "exact over DDP", "possible", "of possible", "predicted", "over the best")
    for job, link in dict.fromkeys((each["job"], each["link"]) for each in results):
        rows = [
            [each["nodes"], *(milliseconds(each["methods"][name]["step_ms"]) for name in names), *compared(each)]
            for each in results
            if (each["job"], each["link"]) == (job, link)
        ]
        rate = "no limit of the link" if link == UNLIMITED else f"{1000 * (gbps_of(link) or 0):.0f} Mb/s"
        lines += ["", f"{job}, {rate}:", "", *table(("machines", *names, *more), rows, left=0)]
    return lines


def compared(result: Mapping[str, Any]) -> list[str]:
    """The columns after those of times."""
    times = {name: found["step_ms"] for name, found in result["methods"].items() if name != FLOOR}
    auto, decided = times[AUTO], result["methods"][AUTO]["decided"]
    best = None if None in times.values() else min(times.values())
    bound = possible_ms(result)
    return [
        ratio(times[DDP], auto),
        ratio(times[DDP], times[EXACT]),
        milliseconds(bound),
        ratio(bound, auto),
        ratio(decided[-1]["predicted_ms"] if decided else None, auto),
        ratio(auto, best),
    ]


def possible_ms(result: Mapping[str, Any]) -> float | None:
    """The least time of a step with the plan that auto chose: computation, forward and the wire, the processors."""
    auto, alone, gbps = result["methods"][AUTO], result["methods"][FLOOR], gbps_of(result["link"])
    if alone["step_ms"] is None or auto["step_ms"] is None:
        return None
    wire_ms = 0.0 if gbps is None else auto["planned_mb"] * 8 / gbps
    processors_ms = result["nodes"] * auto["cpu_ms"] / result["processors"]
    return float(max(alone["step_ms"], alone["forward_ms"] + wire_ms, processors_ms))


def chosen_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """A table of what auto decided last, and after how many steps."""
    rows = [
        (each["nodes"], each["job"], each["link"], decided[-1]["chosen"], decided[-1]["step"], f"{decided[-1]['cost_s']:.1f}")
        for each in results
        if (decided := each["methods"][AUTO]["decided"])
    ]
    return table(("machines", "job", "link", "chosen", "after steps", "cost, s"), rows, left=4)
