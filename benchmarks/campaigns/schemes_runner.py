"""Measures the inputs of the prediction and then all schemes on an emulated cluster, and prints them as a table."""

import os
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.campaigns.schemes import SCHEMES, Exchange, SchemesRecord, SchemesRun, SchemesWork, repeats_for
from gradwire.bench.names import UNLIMITED
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import parse_event
from gradwire.bench.table import milliseconds
from gradwire.core.provenance import Made
from gradwire.errors import FormatError, TestbedError
from gradwire.testbed import EmulatedCluster

__all__ = ["run_schemes", "schemes_tables", "verdict"]

SIZES = tuple(size << 10 for size in (64, 256, 1024, 4096, 16384, 65536))
LARGE = 1 << 20
"""Bytes from which the prediction is meant to hold."""
MEANT = 0.25
ROUNDS = 2
ROOT = Path(__file__).resolve().parents[2]
"""The repository's folder, in which ranks find this package wherever they are started."""


def run_schemes(
    link: str,
    nodes: int,
    ranks_per_node: int,
    problem: str | None,
    watch: ProgressView,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
) -> SchemesRun:
    """Probe links and codec, then measure every scheme at every size. `problem` is `emulation_problem()`.

    Raises TestbedError where no cluster can be emulated or the ranks fail, FormatError for a cluster without two links.
    """
    if problem is not None:
        raise TestbedError(f"schemes cannot be measured here: {problem}. Run as root or allow user namespaces.")
    if nodes < 2 or ranks_per_node < 2:
        raise FormatError(
            f"the cluster is {nodes} x {ranks_per_node}: hierarchical schemes need at least two nodes with two ranks each, or "
            "they are the flat ones. Use --nodes 2 --ranks-per-node 2."
        )
    return SchemesRun(made=Made.now(), link=link, measured=_measured(link, nodes, ranks_per_node, sizes, rounds, watch))


def _measured(
    link: str, nodes: int, ranks_per_node: int, sizes: Sequence[int], rounds: int, watch: ProgressView
) -> SchemesRecord:
    repeats, said = repeats_for(sizes), deque[str](maxlen=40)
    options = sum(1 + bool(scheme.hierarchical) for scheme in SCHEMES)

    def on_line(rank: int, stream: str, line: str) -> None:
        event = parse_event(line) if stream == "stdout" else None
        if event is not None:
            watch.step(event)
        elif line.strip():
            said.append(f"[{rank}] {line}")

    with tempfile.TemporaryDirectory(prefix="gradwire-schemes-") as folder:
        result, order = Path(folder, "record.json"), Path(folder, "work.json")
        work = SchemesWork(
            nbytes=tuple(sizes),
            repeats=repeats,
            rounds=rounds,
            collective_timeout_s=300.0,
            runner=os.getpid(),
            result=str(result),
        )
        work.save(order)
        argv = [sys.executable, "-u", "-m", "benchmarks.campaigns.schemes_worker", str(order)]
        with (
            watch.group(f"schemes, {link}", ["options"], rounds * options * sum(repeats)),
            EmulatedCluster(nodes, ranks_per_node, inter=None if link == UNLIMITED else link) as cluster,
        ):
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            code = cluster.run(argv, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, on_line=on_line, timeout=3600.0)
        if code or not result.exists():
            words = "\n".join(["", *said])
            raise TestbedError(f"the ranks that measure schemes ended with exit code {code}. Their last words:{words}")
        return SchemesRecord.load(result)


def schemes_tables(run: SchemesRun) -> Iterator[Table]:
    """Yield a table of schemes for each size. * is the fastest."""
    measured = run.measured
    cluster = measured.cluster
    for nbytes in dict.fromkeys(exchange.nbytes for exchange in measured.exchanges):
        title = f"{size_name(nbytes)}, {cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {run.link} between nodes"
        table = Table(title=title, title_justify="left")
        for column in ("scheme", "flat ms", "predicted", "inter MB", "hierarchical ms", "predicted", "inter MB", "hier. gains"):
            table.add_column(column, justify="left" if column == "scheme" else "right")
        best = min(median_us(exchange) for exchange in measured.exchanges if exchange.nbytes == nbytes)
        for scheme in SCHEMES:
            found = {e.hierarchical: e for e in measured.exchanges if (e.scheme, e.nbytes) == (scheme.name, nbytes)}
            row = [scheme.name]
            for hierarchical in (False, True):
                exchange = found.get(hierarchical)
                if exchange is None:
                    row += ["-", "-", "-"]
                    continue
                taken, predicted = median_us(exchange), measured.predicted_us(exchange)
                star = " *" if taken == best else ""
                row += [milliseconds(taken) + star, milliseconds(predicted), f"{exchange.inter_bytes / 1e6:.2f}"]
            if len(found) == 2:
                row.append(f"{median_us(found[False]) / median_us(found[True]):.2f}x")
            table.add_row(*row)
        yield table


def verdict(run: SchemesRun) -> str:
    """Describe the quality of the model; '' if no bucket is large enough."""
    errors = {
        f"{e.scheme}{' hierarchical' * e.hierarchical}, {size_name(e.nbytes)}": run.measured.predicted_us(e) / median_us(e) - 1
        for e in run.measured.exchanges
        if e.nbytes >= LARGE
    }
    if not errors:
        return ""
    within = sum(abs(error) <= MEANT for error in errors.values())
    typical, worst = statistics.median(map(abs, errors.values())), max(errors, key=lambda cell: abs(errors[cell]))
    return (
        f"From {size_name(LARGE)} on the prediction is within {MEANT:.0%} of the measured time in {within} of {len(errors)} "
        f"cells; median {typical:.1%}, worst {errors[worst]:+.1%} ({worst})."
    )


def median_us(exchange: Exchange) -> float:
    """The measured time."""
    return statistics.median(exchange.us)


def size_name(nbytes: int) -> str:
    """Write a size in KB or MB of 1024 or 1024^2 bytes.

    >>> size_name(65536), size_name(4 << 20)
    ('64 KB', '4 MB')
    """
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
