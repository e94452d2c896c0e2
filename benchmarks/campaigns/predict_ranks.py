"""Compares predictions with measurements for 2 to 32 ranks, cell by cell, and goes on where it stopped.

    python -m benchmarks predict_ranks [--cells 4x1,sleeping-8x1] [--jobs transformer] [--links 500mbit] [--anew]

A cell is a shape of the cluster with a device. 2x2, 4x1 and 1x4 compute on this machine's processors. In the others computation
is a timed sleep, so many nodes fit on few processors. Cells with `far` have two sites, 50 ms apart. Each job over each link is
profiled, predicted and then measured, as `predict` does. Rows go to benchmarks/results/predict_ranks.json after each job and
link; rows that are there are not measured again, unless `--anew`. Takes about two hours as a whole.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.campaigns.predict import SPECS, PredictRequest, group
from benchmarks.campaigns.predictions import Predicted
from benchmarks.campaigns.requests import RepositoryRequest
from benchmarks.common import RESULTS, print_wide, write
from gradwire.bench.names import UNLIMITED, parse_spec, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem
from gradwire.errors import FormatError, TestbedError

__all__ = ["CELLS", "ClusterCell", "errors_of", "left_to_do", "run"]

PATH = RESULTS / "predict_ranks.json"
METHODS = ("ddp", "gradwire:identity", "gradwire:qsgd4")
RATES = ("100mbit", "500mbit", UNLIMITED)


class ClusterCell(NamedTuple):
    """A shape of the cluster, with what is measured on it."""

    name: str
    nodes: int
    ranks_per_node: int
    device: str
    jobs: tuple[str, ...]
    links: tuple[str, ...] = RATES
    wan: str | None = None


CELLS = (
    ClusterCell("2x2", 2, 2, "cpu", ("transformer", "mlp")),
    ClusterCell("4x1", 4, 1, "cpu", ("transformer", "mlp")),
    ClusterCell("1x4", 1, 4, "cpu", ("transformer", "mlp"), (UNLIMITED,)),
    *(ClusterCell(f"sleeping-{nodes}x1", nodes, 1, "sleeping", ("transformer", "bert")) for nodes in (2, 4, 8, 16, 32)),
    ClusterCell("far-8x1", 8, 1, "sleeping", ("transformer",), ("100mbit",), "50ms"),
)


def run(arguments: list[str]) -> int:
    """Profile, predict and measure what is left; print all rows. Returns 1 if a group failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks predict_ranks")
    parser.add_argument("--cells", help=f"comma-separated; default: all of {','.join(cell.name for cell in CELLS)}")
    parser.add_argument("--jobs", help="comma-separated; default: those of each cell")
    parser.add_argument("--links", help="comma-separated; default: those of each cell")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each method; default: 15")
    parser.add_argument("--profile-steps", type=int, default=8, help="steps of each profiling; default: 8")
    parser.add_argument("--anew", action="store_true", help="measure rows that are there again")
    parser.add_argument("--only-print", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GRADWIRE_SITE", "")  # the far cell has nodes alone
    rows: list[dict[str, Any]] = json.loads(PATH.read_text())["rows"] if PATH.exists() else []
    failed = False
    problem = None if options.only_print else emulation_problem()
    if problem is not None:
        raise TestbedError(f"predictions need links of known rates: {problem}. Run as root or allow user namespaces.")
    wanted = list(left_to_do([] if options.anew else rows, _split(options.cells), _split(options.jobs), _split(options.links)))
    for cell, job, link in [] if options.only_print else wanted:
        try:
            found = list(_measured(cell, job, link, options.steps, options.profile_steps))
        except TestbedError as error:
            print(f"FAILED: {cell.name}, {job}, {link}: {error}", file=sys.stderr)
            failed = True
            continue
        rows = [row for row in rows if _key(row) != (cell.name, job, link)] + found
        write(PATH, {"errors": errors_of(rows), "rows": rows}, quiet=True)
    print_wide([_table(rows)])
    print(json.dumps(errors_of(rows)))
    return int(failed)


def _split(text: str | None) -> list[str] | None:
    return None if text is None else split_names(text)


def left_to_do(
    rows: Sequence[dict[str, Any]], cells: Sequence[str] | None, jobs: Sequence[str] | None, links: Sequence[str] | None
) -> Iterator[tuple[ClusterCell, str, str]]:
    """The cells, jobs and links that have no rows yet, within these names; None: all. Raises FormatError for an unknown cell."""
    known = {cell.name for cell in CELLS}
    for name in cells or ():
        if name not in known:
            raise FormatError(f"there is no cell {name!r}. The cells are {', '.join(sorted(known))}.")
    done = {_key(row) for row in rows}
    for cell in CELLS:
        for job in cell.jobs:
            for link in cell.links:
                asked = ((cell.name, cells), (job, jobs), (link, links))
                if all(names is None or name in names for name, names in asked) and (cell.name, job, link) not in done:
                    yield cell, job, link


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["cell"], row["job"], row["link"]


def _measured(cell: ClusterCell, job: str, link: str, steps: int, profile_steps: int) -> Iterator[dict[str, Any]]:
    """Rows of one group: profiled, predicted, then measured."""
    asked = RepositoryRequest(
        jobs=[job],
        links=[link],
        methods=METHODS,
        device=cell.device,
        nodes=cell.nodes,
        ranks_per_node=cell.ranks_per_node,
        sites=1 if cell.wan is None else 2,
        wan=cell.wan,
        steps=steps,
        alone_steps=0,
    )
    request = PredictRequest(asked, [parse_spec(spec) for spec in SPECS], profile_steps)
    with tempfile.TemporaryDirectory(prefix="gradwire-predict-") as folder:
        fit, cells = group(request, job, link, Path(folder, job), ProgressView(Console(stderr=True)))
        cluster = json.loads(Path(folder, job, "cluster.json").read_text())
    for place, found in enumerate(cells):
        row = {"cell": cell.name, "job": job, "link": link, "method": found.method, "error": found.error, **_times(found)}
        yield row | ({"cluster": cluster, "warned": fit.said} if not place else {})


def _times(found: Predicted) -> dict[str, Any]:
    names = ("predicted_us", "measured_us", "p10_us", "p90_us", "computation_us", "wire_us", "codec_us", "failure")
    return {name: getattr(found, name) for name in names}


def errors_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median and the worst error, as a share of the measured time, and the number of rows.

    >>> errors_of([{"error": 0.1}, {"error": -0.3}, {"error": None}])
    {'rows': 2, 'median': 0.2, 'worst': 0.3}
    """
    found = [abs(row["error"]) for row in rows if row["error"] is not None]
    if not found:
        return {"rows": 0}
    return {"rows": len(found), "median": round(statistics.median(found), 4), "worst": round(max(found), 4)}


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="predicted and measured steps, in ms", title_justify="left")
    for column in ("cell", "job", "link", "method", "predicted", "measured", "p10-p90", "error"):
        table.add_column(column, justify="left" if column in ("cell", "job", "link", "method") else "right")
    for row in sorted(rows, key=lambda row: [cell.name for cell in CELLS].index(row["cell"])):
        if row["measured_us"] is None:
            table.add_row(*_key(row), row["method"], f"{row['predicted_us'] / 1e3:.1f}", "FAILED")
            continue
        spread = f"{row['p10_us'] / 1e3:.1f}-{row['p90_us'] / 1e3:.1f}"
        times = (f"{row[name] / 1e3:.1f}" for name in ("predicted_us", "measured_us"))
        table.add_row(*_key(row), row["method"], *times, spread, f"{100 * row['error']:+.1f} %")
    return table
