"""Compares every scheme, flat and hierarchical, with the model's prediction; measures the loss of a quantised sum:
docs/schemes.md.

    python -m benchmarks schemes [--links 100mbit 200mbit 500mbit]
    python -m benchmarks schemes --measure [--links 200mbit] [--nodes 2] [--ranks-per-node 2] [--json FILE]

The first command measures each link that has no results on 2 nodes of 2 ranks, about fifteen minutes in all, and writes the
page. Needs network namespaces; without them the page is left as it is. The second command measures, prints the tables, and writes
no page. With several links the file's name gets the link before its suffix.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.campaigns.measuring import json_file
from benchmarks.campaigns.schemes import SCHEMES, SchemesRun
from benchmarks.campaigns.schemes_runner import SIZES, median_us, run_schemes, schemes_tables, size_name, verdict
from benchmarks.common import RESULTS, print_wide
from benchmarks.markdown import table
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem
from gradwire.core.files import write_whole
from gradwire.core.specs import QSGD

PAGE = Path(__file__).parent.parent / "docs" / "schemes.md"
SUPPORT = Path(__file__).parent.parent / "tests" / "support"
LINKS = ("100mbit", "200mbit", "500mbit")
FULL = "200mbit"
"""The link over which the largest buckets are measured too."""
WORLDS = (2, 4, 8)
ERRORS = {
    "all-to-all, all-gather (SRA)": "comp:cpu alltoall:inter decomp:cpu comp:cpu allgather:inter decomp:cpu",
    "ring": "comp:cpu reducescatter:inter allgather:inter decomp:cpu",
    "tree": "comp:cpu reduce:inter broadcast:inter decomp:cpu",
    "all-gather of payloads": "comp:cpu allgather:inter decomp:cpu",
}
ELEMENTS, SEEDS = 50_003, 5

HEAD = """# Schemes: which way is fastest

Made by `python -m benchmarks schemes`; do not edit. One bucket of float32 on an emulated cluster of 2 nodes of 2 ranks, {made}.
A cell is the median time from the bucket being ready to its mean being on all ranks, in milliseconds, and in brackets what the
alpha-beta model predicts. Before the schemes run, the profiler measures the links and the codecs for the prediction, as
`gradwire profile` does. It measures exchanges inside nodes, exchanges between nodes, all-reduces, encodes and decodes one by
one. Buckets of 16 KB give the fixed time of a bucket, which is added to each prediction. The fastest of a column is bold. Flat:
all ranks are one group. Hierarchical: gradients are added inside each node first.

"""


def run(arguments: list[str]) -> int:
    """Measure. Without --measure write benchmarks/results/schemes-LINK.json and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks schemes")
    parser.add_argument("--links", nargs="+", help="default: 100mbit 200mbit 500mbit; with --measure 200mbit")
    parser.add_argument("--again", action="store_true", help="measure links that have results already, too")
    parser.add_argument("--measure", action="store_true", help="measure and print, write no page; the rest is for this")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks of each node")
    parser.add_argument("--json", type=json_file, help="file for the results")
    options = parser.parse_args(arguments)
    if options.measure:
        return measure(options.links or [FULL], options.nodes, options.ranks_per_node, options.json)
    return write_page(options.links or LINKS, options.again)


def measure(links: list[str], nodes: int, ranks_per_node: int, json: Path | None) -> int:
    """Measure over each link, and print."""
    watch = ProgressView(Console(stderr=True))
    for link in links:
        run = run_schemes(link, nodes, ranks_per_node, emulation_problem(), watch)
        print_wide(schemes_tables(run))
        print(verdict(run))
        if json is not None:
            run.save(json if len(links) == 1 else json.with_stem(f"{json.stem}-{link}"))
        for problem in run.measured.problems:
            print(f"Note: {problem}")
    return 0


def write_page(links: Sequence[str], again: bool) -> int:
    """Measure what is missing, and write the results and the page."""
    if problem := emulation_problem():
        print(f"schemes: not measured, {problem}")
        return 0
    errors = reduction_errors()
    runs = []
    for link in links:
        path = RESULTS / f"schemes-{link}.json"
        if again or not path.exists():
            sizes = SIZES if link == FULL else SIZES[:-1]
            run_schemes(link, 2, 2, None, ProgressView(Console(stderr=True)), sizes).save(path)
        runs.append(SchemesRun.load(path))
    write_whole(PAGE, page(runs, errors))
    print(f"written to {PAGE}")
    return 0


def reduction_errors() -> dict[str, list[float]]:
    """Relative error of the mean of normal numbers at 4 bits, blocks of 128, by scheme, for each of `WORLDS`."""
    sys.path.insert(0, str(SUPPORT))
    import torch
    from options import Ranks, gradients, plan_for

    from gradwire.transport import Grid

    found: dict[str, list[float]] = {}
    for name, tasks in ERRORS.items():
        for world_size in WORLDS:
            offs = []
            for step in range(SEEDS):
                grid = [Grid.even(1, world_size, rank) for rank in range(world_size)]
                ranks = Ranks(plan_for(tasks.split(), QSGD(bits=4), (ELEMENTS,)), grid, (ELEMENTS,))
                given = [gradients(rank, step, (ELEMENTS,)) for rank in range(world_size)]
                ranks.step(step, given)
                true = torch.stack([torch.cat(own).double() for own in given]).mean(0)
                offs.append(float((ranks.results()[0].double() - true).norm() / true.norm()))
            found.setdefault(name, []).append(statistics.mean(offs))
    return found


def page(runs: list[SchemesRun], errors: dict[str, list[float]]) -> str:
    """The page, from results."""
    parts = [HEAD.format(made=runs[0].made.date[:10])]
    for measured in runs:
        parts += _link(measured)
    parts.append(_errors(errors))
    return "\n".join(parts)


def _link(run: SchemesRun) -> Iterator[str]:
    sizes = sorted({exchange.nbytes for exchange in run.measured.exchanges})
    best = {size: min(median_us(e) for e in run.measured.exchanges if e.nbytes == size) for size in sizes}
    yield f"## {run.link} between nodes\n"
    rows = []
    for scheme in SCHEMES:
        for hierarchical in (False, True)[: 1 + bool(scheme.hierarchical)]:
            cells = []
            for size in sizes:
                key = (scheme.name, hierarchical, size)
                exchange = next(e for e in run.measured.exchanges if (e.scheme, e.hierarchical, e.nbytes) == key)
                measured, predicted = median_us(exchange), run.measured.predicted_us(exchange)
                text = f"{measured / 1e3:.4g} ({predicted / 1e3:.4g})"
                cells.append(f"**{text}**" if measured == best[size] else text)
            name = "" if hierarchical else scheme.name
            rows.append((name, "hierarchical" if hierarchical else "flat", *cells))
    yield from table(("scheme", "", *map(size_name, sizes)), rows, left=2)
    intra, inter = run.measured.cluster.intra, run.measured.cluster.inter
    yield (
        f"\n{verdict(run)} Fits: inside a node {intra.alpha_us:.0f} us and {intra.gbps:.2f} Gb/s, between nodes "
        f"{inter.alpha_us:.0f} us and {inter.gbps:.3f} Gb/s; every bucket {run.measured.start_us:.0f} us.\n"
    )
    yield "4 bits by all-to-all and all-gather, hierarchical beside flat: " + _gains(run, sizes) + "\n"


def _gains(run: SchemesRun, sizes: list[int]) -> str:
    """Times and bytes of CGX's scheme."""
    found = {(e.hierarchical, e.nbytes): e for e in run.measured.exchanges if e.scheme == "4 bits: all-to-all, all-gather"}
    gains = ", ".join(
        f"{median_us(found[False, size]) / median_us(found[True, size]):.2f} times as fast at {size_name(size)}" for size in sizes
    )
    largest = sizes[-1]
    means, counted = (
        getattr(found[True, largest], field) / getattr(found[False, largest], field) for field in ("inter_bytes", "counted_bytes")
    )
    return f"{gains}; {means:.3f} of the bytes between nodes ({counted:.3f} as the interface counts them)."


def _errors(errors: dict[str, list[float]]) -> str:
    lines = [
        "## What a quantised sum loses\n",
        f"Relative error of the mean at 4 bits, blocks of 128 and their maximum, of {ELEMENTS:,} normal numbers, mean of {SEEDS} "
        "runs.\n",
    ]
    rows = [(name, *(f"{off:.3f}" for off in found)) for name, found in errors.items()]
    lines += table(("scheme", *(f"{world_size} ranks" for world_size in WORLDS)), rows, left=1)
    lines.append(
        "\nWhere payloads are added and encoded again, two phases lose least: one encode of each gradient and one of the sum, "
        "whatever the number of ranks. Ring and tree encode partial sums again at every hop.\n"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(reduction_errors(), indent=1))
