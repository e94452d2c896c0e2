"""`gradwire demo`: a transformer on two nodes with a slow link between them, plain DDP beside gradwire with plan="auto".

Step times exclude the steps before gradwire's decision; the curves and the page include them.

With network namespaces, all numbers are measured. Without, the ranks run over plain loopback, and the step time at the
demo's rate is computed as max(measured step, wire time of the bytes). The computed time assumes perfect overlap, which
favours DDP.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from rich.table import Table

from gradwire.bench.names import UNLIMITED
from gradwire.bench.progress import ProgressView
from gradwire.bench.recorded import beside, method_folder
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.runner import BenchRequest, run_bench, run_profile
from gradwire.bench.statistics import median_ratio, wire_us
from gradwire.bench.table import milliseconds
from gradwire.core.files import make_folder
from gradwire.core.specs import QSGD, ErrorFeedback
from gradwire.core.strict import Document
from gradwire.errors import GradwireError, TestbedError
from gradwire.record.run import Run
from gradwire.report.page import write_report
from gradwire.report.pictures import save
from gradwire.testbed import parse_rate

JOB = "transformer"
LINK = "500mbit"
NODES = 2
METHODS = {"floor": "floor", "ddp": "ddp", "gradwire": "gradwire:auto"}
"""The methods by their names in the summary."""
MEASURED = "measured"
COMPUTED = "computed, not measured"
SPECS = [QSGD(bits=4), ErrorFeedback(QSGD(bits=2))]
"""The specs that auto may choose. The profile times their codecs for the page's prediction."""
PROFILE_STEPS = 10
MOST_DECIDING_STEPS = 90
"""The most steps before gradwire's decision. The demo also takes at most `steps` of them."""
GIVEN = "4 bits for all tensors, a fixed plan: auto needs a slow link to choose compression, and loopback is fast"
UNDECIDED = "4 bits, and trials: auto had not decided yet (a decision takes 40 to 80 steps)"
FINAL_STEPS = 10
"""The final loss is the mean over the last steps that all methods made."""
# Okabe and Ito's palette, which people with any kind of colour vision can tell apart
BLUE, VERMILION, YELLOW, GREY = "#0072B2", "#D55E00", "#F0E442", "#999999"
COLOURS = {"ddp": VERMILION, "gradwire": BLUE}
LABELS = {"floor": "no\ncommunication", "ddp": "plain DDP", "gradwire": "gradwire"}
SMOOTHED_STEPS = 10
"""The drawn loss is the mean over so many steps."""


class DemoMethod(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method of the demo."""

    step_ms: float
    """Median at the link's rate, measured or computed: see the summary's `speed`."""
    measured_step_ms: float
    exposed_ms: float
    """`step_ms` minus the floor's."""
    final_loss: float
    bytes_per_step: int
    """Per rank: counted at the interface; over loopback, which other programs use too, as planned."""
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
    """"measured", or "computed, not measured" if no link could be emulated."""
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
    """The plan that gradwire chose, in words."""
    deciding_steps: int = 0
    """gradwire's steps before the measured steps."""


class DemoCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The loss curve of one method in the picture."""

    seconds: list[float]
    """The end of each step at the link's rate."""
    loss: list[float]


def run_demo(steps: int, out: Path, problem: str | None, watch: ProgressView) -> DemoSummary:
    """Measure, and write `summary.json`, `demo.png`, `bench.json`, `run.json` and `report.html` to the folder `out`.

    With an emulated link, also write the profile for the page's prediction. `problem` is
    `gradwire.bench.runner.emulation_problem()`. Raises `GradwireError` if one of the methods fails.
    """
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
            raise GradwireError("the demo could not be measured:\n" + "\n".join(run.failures))
        recorded = Run.read(method_folder(Path(folder) / f"{JOB}-{link}", _methods(problem)["gradwire"]))
    summary, curves = summarise(run, out / "demo.png", problem)
    draw_demo(summary, curves, out / "demo.png")
    summary.save(out / "summary.json")
    recorded = _at_rate(msgspec.structs.replace(recorded, made=run.made), run, link, problem)
    if problem is None:
        try:
            run_profile(request, JOB, LINK, SPECS, PROFILE_STEPS, out, watch)
        except TestbedError as error:
            recorded = msgspec.structs.replace(recorded, notes=(*recorded.notes, f"The step is not predicted: {error}"))
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
    speedup = median_ratio(counted["ddp"], counted["gradwire"])
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
    """The summary as a table for the terminal."""
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


def _at_rate(recorded: Run, run: BenchRun, link: str, problem: str | None) -> Run:
    """The recorded run with all methods' times at the demo's rate."""
    cells = {name: _cell(run, link, name) for name in _methods(problem).values()}
    times = {name: msgspec.structs.replace(cell, step_us=_steps_at_rate(cell)) for name, cell in cells.items()}
    whole = beside(recorded, times[_methods(problem)["gradwire"]], times, run.warmup_steps, run.turn_steps)
    if problem is None:
        return whole
    note = (
        f"No link could be emulated: {problem}. Step times at {LINK} are computed from the bytes, not measured. The timeline "
        "shows a step over loopback."
    )
    return msgspec.structs.replace(whole, notes=(*whole.notes, note))


def _methods(problem: str | None) -> dict[str, str]:
    """Over loopback auto would send uncompressed gradients, because loopback is fast."""
    return METHODS if problem is None else METHODS | {"gradwire": "gradwire:qsgd4"}


def _cell(run: BenchRun, link: str, method: str) -> Cell:
    cell = run.cell(JOB, link, method)
    if cell is None or cell.step is None:
        raise GradwireError(f"the run has no result for {method} on {JOB} over {link}. Run the demo again.")
    return cell


def _steps_at_rate(cell: Cell) -> list[float]:
    """Microseconds of each step at the demo's rate, measured or computed."""
    if cell.link != UNLIMITED or cell.planned_bytes is None:
        return cell.step_us
    wire = wire_us(cell.planned_bytes, parse_rate(LINK) / 1e9)
    return [max(us, wire) for us in cell.step_us]


def draw_demo(summary: DemoSummary, curves: Mapping[str, DemoCurve], path: Path) -> None:
    """Write the PNG: left the loss over time, right the step split into compute and exposed exchange."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
        speed = "" if summary.problem is None else f" ({summary.speed})"
        figure.suptitle(
            f"A 6M-parameter transformer on {summary.nodes} nodes at {summary.link}{speed}:\n"
            f"gradwire {summary.speedup:.2f} times as fast as plain DDP"
        )
        _draw_loss(left, curves, speed)
        _draw_split(right, summary, speed)
        save(figure, path)
        pyplot.close(figure)


def _draw_loss(axes: Any, curves: Mapping[str, DemoCurve], speed: str) -> None:
    for name, curve in curves.items():
        axes.plot(curve.seconds, curve.loss, color=COLOURS[name], linewidth=0.7, alpha=0.3)
        style, loss = "-" if name == "gradwire" else "--", curve.loss
        mean = [np.mean(loss[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(loss) + 1)]
        axes.plot(curve.seconds, mean, style, color=COLOURS[name], linewidth=2.2, label=LABELS[name])
    axes.set_xlabel(f"seconds of training{speed}")
    axes.set_ylabel("training loss")
    axes.set_xlim(left=0)
    axes.set_title("Loss over time, including the steps before the decision", loc="left", fontsize=12)
    axes.legend(frameon=False)


def _draw_split(axes: Any, summary: DemoSummary, speed: str) -> None:
    names = list(summary.methods)
    compute_ms = summary.methods["floor"].step_ms
    totals = [summary.methods[name].step_ms for name in names]
    compute = [min(compute_ms, total) for total in totals]
    exposed = [total - part for total, part in zip(totals, compute, strict=True)]
    labels = [LABELS[name] for name in names]
    hatched = {"color": YELLOW, "hatch": "//", "edgecolor": "black"}
    axes.bar(labels, compute, color=GREY, width=0.6, label="compute")
    axes.bar(labels, exposed, bottom=compute, width=0.6, label="exposed exchange", **hatched)
    for position, total in enumerate(totals):
        axes.annotate(f"{total:.0f}", (position, total), (0, 4), textcoords="offset points", ha="center")
    axes.set_ylabel(f"milliseconds a step{speed and ' at ' + summary.link}")
    axes.set_ylim(0, 1.25 * max(totals))
    axes.set_title("Where a step's time goes", loc="left", fontsize=12)
    axes.legend(frameon=False, loc="upper right", ncols=2)
