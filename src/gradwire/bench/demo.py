"""`gradwire demo`: a transformer on two nodes with a slow link between them, plain DDP beside gradwire.

Where network namespaces may be made, everything is measured. Where not, plain loopback shows the loss and the bytes,
and the time at the demo's rate is computed from those: the measured step, or the time the bytes need on the link if
that is longer, for both methods alike. That is as if every byte were hidden behind compute, which flatters DDP.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from rich.table import Table

from gradwire.bench.names import UNLIMITED
from gradwire.bench.results import BenchRun, Cell, Interval
from gradwire.bench.runner import BenchRequest, Watch, run_bench
from gradwire.bench.statistics import median_ratio, wire_us
from gradwire.bench.table import milliseconds
from gradwire.core.strict import Document
from gradwire.errors import GradwireError
from gradwire.testbed import parse_rate

__all__ = ["DemoCurve", "DemoMethod", "DemoSummary", "run_demo", "summary_table"]

JOB = "transformer"
LINK = "500mbit"
NODES = 2
METHODS = {"floor": "floor", "ddp": "ddp", "gradwire": "gradwire:qsgd4"}
"""What the summary calls the methods, and what the bench calls them."""
MEASURED = "measured"
COMPUTED = "computed, not measured"
FINAL_STEPS = 10
"""The final loss is the mean of so many last steps: a single batch says little."""


class DemoMethod(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method of the demo."""

    step_ms: float
    """Median, at the link's rate: measured or computed, as the summary's `speed` says."""
    measured_step_ms: float
    exposed_ms: float
    """`step_ms` minus the floor's."""
    final_loss: float
    bytes_per_step: int
    """Per rank, counted at the interface."""
    planned_bytes: int | None


class DemoSummary(Document, frozen=True, kw_only=True):
    """`summary.json` of the demo."""

    what: ClassVar[str] = "summary of the demo"
    remedy: ClassVar[str] = "Make it with `gradwire demo`."

    version: int = 1
    link: str
    nodes: int
    steps: int
    speed: str
    """"measured", or "computed, not measured" where no link could be emulated."""
    network: str
    methods: dict[str, DemoMethod]
    speedup: float
    """DDP's median step over gradwire's, at the link's rate."""
    speedup_low: float
    speedup_high: float
    """A 95 % bootstrap interval."""
    bytes_ratio: float
    """DDP's counted bytes over gradwire's."""
    picture: str
    problem: str | None = None
    """Why no link could be emulated."""


class DemoCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What the picture draws of one method."""

    seconds: list[float]
    """When each step ended, at the link's rate."""
    loss: list[float]


def run_demo(steps: int, out: Path, problem: str | None, watch: Watch) -> DemoSummary:
    """Measure, and write `summary.json`, `demo.png` and `bench.json` to the folder `out`.

    `problem` is `gradwire.bench.runner.emulation_problem()`. Raises `GradwireError` if one of the methods failed.
    """
    from gradwire.bench.picture import draw_demo

    out.mkdir(parents=True, exist_ok=True)
    request = BenchRequest(
        jobs=[JOB],
        links=[LINK if problem is None else UNLIMITED],
        methods=list(METHODS.values()),
        nodes=NODES,
        steps=steps,
        alone_steps=0,
    )
    run = run_bench(request, problem, watch)
    run.save(out / "bench.json")
    if run.failures:
        raise GradwireError("the demo could not be measured. " + "\n".join(run.failures))
    summary, curves = summarise(run, out / "demo.png", problem)
    draw_demo(summary, curves, out / "demo.png")
    summary.save(out / "summary.json")
    return summary


def summarise(run: BenchRun, picture: Path, problem: str | None) -> tuple[DemoSummary, dict[str, DemoCurve]]:
    """The summary and the curves of a run of the demo's three methods."""
    link = LINK if problem is None else UNLIMITED
    cells = {short: _cell(run, link, name) for short, name in METHODS.items()}
    at_rate = {short: _steps_at_rate(cell) for short, cell in cells.items()}
    counted = {short: steps[run.warmup_steps :] for short, steps in at_rate.items()}
    medians_ms = {short: float(np.median(steps)) / 1e3 for short, steps in counted.items()}
    methods = {
        short: DemoMethod(
            step_ms=medians_ms[short],
            measured_step_ms=cell.step.median_us / 1e3 if cell.step else 0.0,
            exposed_ms=medians_ms[short] - medians_ms["floor"],
            final_loss=float(np.mean(cell.loss[-FINAL_STEPS:])),
            bytes_per_step=round(cell.counted_bytes or 0),
            planned_bytes=cell.planned_bytes,
        )
        for short, cell in cells.items()
    }
    speedup: Interval = median_ratio(counted["ddp"], counted["gradwire"])
    summary = DemoSummary(
        link=LINK,
        nodes=run.nodes,
        steps=run.steps,
        speed=MEASURED if problem is None else COMPUTED,
        network=run.network,
        methods=methods,
        speedup=speedup.ratio,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        bytes_ratio=methods["ddp"].bytes_per_step / methods["gradwire"].bytes_per_step,
        picture=str(picture),
        problem=problem,
    )
    curves = {
        short: DemoCurve(seconds=[float(us) / 1e6 for us in np.cumsum(at_rate[short])], loss=cells[short].loss)
        for short in ("ddp", "gradwire")
    }
    return summary, curves


def summary_table(summary: DemoSummary) -> Table:
    """The demo's numbers for the terminal."""
    title = f"{JOB}, {summary.nodes} nodes, {summary.link} ({summary.speed}), {summary.steps} steps"
    table = Table(title=title, title_justify="left")
    for name in ("", "step ms", "exposed ms", "MB sent a step", f"loss, last {FINAL_STEPS}"):
        table.add_column(name, justify="right" if name else "left")
    for name, method in summary.methods.items():
        table.add_row(
            "no communication" if name == "floor" else name,
            milliseconds(method.step_ms * 1e3),
            milliseconds(method.exposed_ms * 1e3),
            f"{method.bytes_per_step / 1e6:.2f}",
            "-" if name == "floor" else f"{method.final_loss:.3f}",
        )
    return table


def _cell(run: BenchRun, link: str, method: str) -> Cell:
    cell = run.cell(JOB, link, method)
    if cell is None or cell.step is None:
        raise GradwireError(f"the run has no result for {method} on {JOB} over {link}, so there is nothing to show.")
    return cell


def _steps_at_rate(cell: Cell) -> Sequence[float]:
    """Microseconds of each step at the demo's rate: as measured on that link, or computed from an unlimited one."""
    if cell.link != UNLIMITED or cell.planned_bytes is None:
        return cell.step_us
    wire = wire_us(cell.planned_bytes, parse_rate(LINK) / 1e9)
    return [max(us, wire) for us in cell.step_us]
