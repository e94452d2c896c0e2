"""`gradwire demo`: a transformer on two nodes with a slow link between them, plain DDP beside gradwire with plan="auto".

Times are of the steps after gradwire had decided; the curves and the page show those in which it did too.

Where network namespaces may be made, everything is measured. Where not, plain loopback shows the loss and the bytes,
and the time at the demo's rate is computed from those: the measured step, or the time the bytes need on the link if
that is longer, for both methods alike. That is as if every byte were hidden behind compute, which flatters DDP.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from rich.table import Table

from gradwire.bench.names import UNLIMITED
from gradwire.bench.recorded import beside, measured, method_folder
from gradwire.bench.results import BenchRun, Cell, Interval
from gradwire.bench.runner import BenchRequest, RunWatch, run_bench, run_profile
from gradwire.bench.statistics import median_ratio, wire_us
from gradwire.bench.table import milliseconds
from gradwire.core.files import make_folder
from gradwire.core.specs import QSGD, ErrorFeedback
from gradwire.core.strict import Document
from gradwire.errors import GradwireError, TestbedError
from gradwire.record.run import Run
from gradwire.report.writing import write_report
from gradwire.testbed import parse_rate

__all__ = ["DemoCurve", "DemoMethod", "DemoSummary", "run_demo", "summary_table"]

JOB = "transformer"
LINK = "500mbit"
NODES = 2
METHODS = {"floor": "floor", "ddp": "ddp", "gradwire": "gradwire:auto"}
"""What the summary calls the methods, and what the bench calls them."""
METHODS_WITHOUT_LINK = METHODS | {"gradwire": "gradwire:qsgd4"}
"""Auto decides by the links that there are; over loopback it would rightly send gradients as they are."""
MEASURED = "measured"
COMPUTED = "computed, not measured"
SPECS = [QSGD(bits=4), ErrorFeedback(QSGD(bits=2))]
"""Of which codecs are timed, for the page's prediction: those that auto may choose."""
PROFILE_STEPS = 10
MOST_DECIDING_STEPS = 90
"""In which gradwire decides before the steps that count; no more than those, so that a short demo is short."""
GIVEN = "4 bits for all, which was given: auto decides by measured links, and there is no slow one here"
UNDECIDED = "4 bits, and trials: auto had not decided yet, which takes 40 to 80 steps"
FINAL_STEPS = 10
"""The final loss is the mean of so many steps, the last ones that all methods made: a single batch says little."""


class DemoMethod(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method of the demo."""

    step_ms: float
    """Median, at the link's rate: measured or computed, as the summary's `speed` says."""
    measured_step_ms: float
    exposed_ms: float
    """`step_ms` minus the floor's."""
    final_loss: float
    bytes_per_step: int
    """Per rank: counted at the interface; as planned where the interface is one that other programs send over too."""
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
    """DDP's bytes over gradwire's."""
    picture: str
    problem: str | None = None
    """Why no link could be emulated."""
    decided: str = ""
    """What gradwire decided to run, in words, or that it had not decided yet."""
    deciding_steps: int = 0
    """Its steps before those that count."""


class DemoCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What the picture draws of one method."""

    seconds: list[float]
    """When each step ended, at the link's rate."""
    loss: list[float]


def run_demo(steps: int, out: Path, problem: str | None, watch: RunWatch) -> DemoSummary:
    """Measure, and write `summary.json`, `demo.png`, `bench.json`, `run.json` and `report.html` to the folder `out`, and, where
    a link can be emulated, the profile that the page's prediction is made from.

    `problem` is `gradwire.bench.runner.emulation_problem()`. Raises `GradwireError` if one of the methods failed.
    """
    from gradwire.bench.picture import draw_demo

    make_folder(out)
    link = LINK if problem is None else UNLIMITED
    with tempfile.TemporaryDirectory(prefix="gradwire-demo-") as folder:
        request = BenchRequest(
            jobs=[JOB],
            links=[link],
            methods=list(_methods(problem).values()),
            nodes=NODES,
            steps=steps,
            alone_steps=0,
            deciding_steps=min(MOST_DECIDING_STEPS, steps),
            record=Path(folder),
        )
        run = run_bench(request, problem, watch)
        run.save(out / "bench.json")
        if run.failures:
            raise GradwireError("the demo could not be measured. " + "\n".join(run.failures))
        recorded = Run.read(method_folder(Path(folder) / f"{JOB}-{link}", _methods(problem)["gradwire"]))
    summary, curves = summarise(run, out / "demo.png", problem)
    draw_demo(summary, curves, out / "demo.png")
    summary.save(out / "summary.json")
    recorded = _at_rate(msgspec.structs.replace(recorded, made=run.made), run, link, problem)
    if problem is None and (failure := _profile(request, out, watch)):
        recorded = msgspec.structs.replace(recorded, notes=(*recorded.notes, failure))
    recorded.save(out / "run.json")
    write_report(out)
    return summary


def summarise(run: BenchRun, picture: Path, problem: str | None) -> tuple[DemoSummary, dict[str, DemoCurve]]:
    """The summary and the curves of a run of the demo's three methods."""
    link = LINK if problem is None else UNLIMITED
    cells = {short: _cell(run, link, name) for short, name in _methods(problem).items()}
    at_rate = {short: _steps_at_rate(cell) for short, cell in cells.items()}
    first = {short: cell.counted[0] or run.warmup_steps for short, cell in cells.items()}
    counted = {short: steps[first[short] : first[short] + run.steps] for short, steps in at_rate.items()}
    decided = [each for each in cells["gradwire"].decided if each.step <= first["gradwire"]]
    common = min(len(cell.loss) for cell in cells.values())
    medians_ms = {short: float(np.median(steps)) / 1e3 for short, steps in counted.items()}
    methods = {
        short: DemoMethod(
            step_ms=medians_ms[short],
            measured_step_ms=cell.step.median_us / 1e3 if cell.step else 0.0,
            exposed_ms=medians_ms[short] - medians_ms["floor"],
            final_loss=float(np.mean(cell.loss[max(0, common - FINAL_STEPS) : common])),
            bytes_per_step=round((cell.counted_bytes if problem is None else cell.planned_bytes) or 0),
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
        decided=GIVEN if problem is not None else decided[-1].chosen if decided else UNDECIDED,
        deciding_steps=first["gradwire"],
    )
    curves = {
        short: DemoCurve(seconds=[float(us) / 1e6 for us in np.cumsum(at_rate[short])], loss=cells[short].loss)
        for short in ("ddp", "gradwire")
    }
    return summary, curves


def summary_table(summary: DemoSummary) -> Table:
    """The demo's numbers for the terminal."""
    title = f"{JOB}, {summary.nodes} nodes, {summary.link} ({summary.speed}), {summary.steps} steps"
    caption = f"gradwire ran {summary.decided}."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
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


def _profile(request: BenchRequest, out: Path, watch: RunWatch) -> str:
    """Measure what the page's prediction is made from. Returns why that failed: the demo has its numbers without."""
    try:
        run_profile(request, JOB, LINK, SPECS, PROFILE_STEPS, out, watch)
    except TestbedError as error:
        return f"The step is not predicted: {error}"
    return ""


def _at_rate(recorded: Run, run: BenchRun, link: str, problem: str | None) -> Run:
    """The recorded run with all methods' times at the demo's rate."""
    cells = {name: _cell(run, link, name) for name in _methods(problem).values()}
    times = {name: measured(cell)._replace(step_us=_steps_at_rate(cell)) for name, cell in cells.items()}
    whole = beside(recorded, times[_methods(problem)["gradwire"]], times, run.warmup_steps, run.turn_steps)
    if problem is None:
        return whole
    note = (
        f"No link could be emulated: {problem}. Times of steps are computed from bytes and the rate of {LINK}, not measured; "
        "the timeline of a step is one over loopback."
    )
    return msgspec.structs.replace(whole, notes=(*whole.notes, note))


def _methods(problem: str | None) -> dict[str, str]:
    return METHODS if problem is None else METHODS_WITHOUT_LINK


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
