"""Runs `gradwire demo`: a transformer on two nodes with a slow link between them, with plain DDP and with plan="auto".

Both methods train for equal seconds, in turns, on the same data in the same order, from their first step on. The steps
in which gradwire's auto measures and tries plans count. After each turn rank 0 evaluates on held-out batches.

Without network namespaces the ranks run over loopback with a given plan, and loss is drawn against bytes instead of seconds.
"""

import tempfile
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from rich.table import Table

from gradwire.auto import all_specs
from gradwire.bench.jobs import make_job
from gradwire.bench.names import UNLIMITED
from gradwire.bench.progress import View
from gradwire.bench.recorded import method_folder
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.runner import BenchRequest, run_bench, run_profile
from gradwire.bench.table import milliseconds
from gradwire.core import Document, check_writable, make_folder
from gradwire.errors import GradwireError, TestbedError
from gradwire.record import Run
from gradwire.report.page import write_report
from gradwire.report.pictures import save

JOB = "transformer"
LINK = "100mbit"
NODES = 2
METHODS = {"floor": "floor", "ddp": "ddp", "gradwire": "gradwire:auto"}
"""The name of each method on the command line, by its name in the summary."""
SPECS = all_specs("safe", NODES)
"""The specs that auto may choose. The profile times their codecs for the page's prediction."""
FLOOR_STEPS, PROFILE_STEPS = 10, 8
GIVEN = "4 bits for all tensors, a given plan: over loopback, which is fast, auto would send gradients as they are"
UNDECIDED = "the plan of the first steps: there were too few of them for a decision"
# Okabe and Ito's palette, which people with any kind of colour vision can distinguish
BLUE, VERMILION, YELLOW, GREY = "#0072B2", "#D55E00", "#F0E442", "#999999"
COLOURS = {"ddp": VERMILION, "gradwire": BLUE}
LABELS = {"floor": "no\ncommunication", "ddp": "plain DDP", "gradwire": "gradwire"}


class DemoMethod(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int
    samples: int
    """Training samples that all ranks have seen."""
    seconds: float
    """Time of all steps."""
    step_ms: float
    """Median time of a step; for gradwire, of a step after its decision."""
    exposed_ms: float
    """`step_ms` minus the floor's."""
    bytes_per_step: int
    """Bytes per rank: counted at the interface. Over loopback, which other programs use too: as planned."""
    held_out: list[tuple[float, float]]
    """Loss on held-out batches: pairs of seconds of training before and the loss. Empty for the floor."""

    @property
    def last_loss(self) -> float:
        return self.held_out[-1][1]


class DemoSummary(Document, frozen=True, kw_only=True):
    what: ClassVar[str] = "summary of the demo"
    remedy: ClassVar[str] = "Make it with `gradwire demo`."

    version: int = 1
    link: str
    nodes: int
    network: str
    methods: dict[str, DemoMethod]
    speedup: float
    """gradwire's steps over DDP's in equal seconds, including the steps until gradwire's decision."""
    bytes_ratio: float
    """DDP's bytes per step over gradwire's."""
    passed_s: float | None = None
    """Seconds of training after which gradwire's held-out loss was at or below DDP's last one; null if it never was."""
    picture: str
    problem: str | None = None
    """The reason why no link could be emulated; null if one was."""
    decided: str = ""
    """The plan that gradwire chose, in words."""


def run_demo(link: str, seconds: float, out: Path, problem: str | None, watch: View) -> DemoSummary:
    """Measure, and write `summary.json`, `demo.png`, `bench.json`, `run.json` and `report.html` to the folder `out`.

    link: a rate such as "100mbit". seconds: of training, for each of the two methods. problem: the result of
    `gradwire.bench.runner.emulation_problem()`. With an emulated link, the profile for the page's prediction is written
    too. Raises `GradwireError` if one of the methods fails.
    """
    check_writable(make_folder(out) / "run.json")
    with tempfile.TemporaryDirectory(prefix="gradwire-demo-") as folder:
        request = BenchRequest(
            jobs=[JOB],
            links=[link if problem is None else UNLIMITED],
            methods=list(_methods(problem).values()),
            nodes=NODES,
            steps=FLOOR_STEPS,
            race_s=seconds,
            alone_steps=0,
            record=Path(folder),
        )
        run = run_bench(request, problem, watch)
        for name in ("profile.json", "cluster.json", "costs.json"):  # of an earlier demo, maybe over another link
            (out / name).unlink(missing_ok=True)
        run.save(out / "bench.json")
        if run.failures:
            raise GradwireError("the demo could not be measured:\n" + "\n".join(run.failures))
        group = method_folder(Path(folder), f"{JOB}-{request.links[0]}")
        recorded = Run.read(method_folder(group, _methods(problem)["gradwire"]))
    summary = summarise(run, link, out / "demo.png", problem)
    draw_demo(summary, out / "demo.png")
    summary.save(out / "summary.json")
    if problem is not None:
        notes = (*recorded.notes, f"No link could be emulated: {problem}. All times are of loopback.")
        recorded = msgspec.structs.replace(recorded, notes=notes)
    else:
        try:
            more = run_profile(request, JOB, link, SPECS, PROFILE_STEPS, out, watch)
        except TestbedError as error:
            more = (f"The step is not predicted: {error}",)
        recorded = msgspec.structs.replace(recorded, notes=(*recorded.notes, *more))
    recorded.save(out / "run.json")
    write_report(out)
    return summary


def summarise(run: BenchRun, link: str, picture: Path, problem: str | None) -> DemoSummary:
    """Summarise a run of the demo's three methods."""
    cells = {short: _cell(run, name) for short, name in _methods(problem).items()}
    floor = cells["floor"].step
    assert floor is not None
    batch = make_job(JOB).batch_size
    methods = {}
    for short, cell in cells.items():
        ends = [0.0, *accumulate(us / 1e6 for us in cell.step_us)]
        assert cell.step is not None
        methods[short] = DemoMethod(
            steps=len(cell.step_us),
            samples=len(cell.step_us) * batch * run.nodes * run.ranks_per_node,
            seconds=ends[-1],
            step_ms=cell.step.median_us / 1e3,
            exposed_ms=(cell.step.median_us - floor.median_us) / 1e3,
            bytes_per_step=round((cell.counted_bytes if problem is None else cell.planned_bytes) or 0),
            held_out=[(ends[steps], loss) for steps, loss in cell.held_out],
        )
    ddp, ours = methods["ddp"], methods["gradwire"]
    decided = cells["gradwire"].decided
    return DemoSummary(
        link=link,
        nodes=run.nodes,
        network=run.network,
        methods=methods,
        speedup=(ours.steps / ours.seconds) / (ddp.steps / ddp.seconds),
        bytes_ratio=ddp.bytes_per_step / ours.bytes_per_step,
        passed_s=next((seconds for seconds, loss in ours.held_out if loss <= ddp.last_loss), None),
        picture=str(picture),
        problem=problem,
        decided=GIVEN if problem is not None else decided[-1].chosen if decided else UNDECIDED,
    )


def summary_table(summary: DemoSummary) -> Table:
    """Return the summary as a table for the terminal."""
    where = summary.link if summary.problem is None else "loopback"
    title = f"{JOB}, {summary.nodes} nodes, {where}"
    caption = f"gradwire ran {summary.decided}."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("", "seconds", "steps", "samples", "held-out loss", "step ms", "MB sent a step"):
        table.add_column(name, justify="right" if name else "left")
    for name, method in summary.methods.items():
        trained = name != "floor"
        table.add_row(
            LABELS[name].replace("\n", " "),
            f"{method.seconds:.0f}" if trained else "-",
            str(method.steps) if trained else "-",
            str(method.samples) if trained else "-",
            f"{method.last_loss:.3f}" if trained else "-",
            milliseconds(method.step_ms * 1e3),
            f"{method.bytes_per_step / 1e6:.2f}",
        )
    return table


def closing_lines(summary: DemoSummary) -> list[str]:
    """Describe the result of the demo in sentences."""
    ddp, ours = summary.methods["ddp"], summary.methods["gradwire"]
    if summary.problem is not None:
        return [f"gradwire sent {summary.bytes_ratio:.1f} times fewer bytes a step than plain DDP."]
    lines = [
        f"In {ours.seconds:.0f} seconds gradwire took {ours.steps} steps ({ours.samples} samples), plain DDP {ddp.steps} "
        f"({ddp.samples}): {summary.speedup:.1f} times as many."
    ]
    if summary.passed_s is None:
        lines.append(f"gradwire did not reach DDP's last held-out loss, {ddp.last_loss:.3f}.")
    else:
        lines.append(
            f"DDP's last held-out loss, {ddp.last_loss:.3f}, took DDP {ddp.seconds:.0f} seconds and gradwire "
            f"{summary.passed_s:.1f}. gradwire's last one is {ours.last_loss:.3f}."
        )
    return lines


def _methods(problem: str | None) -> dict[str, str]:
    """Return the methods. Over loopback gradwire gets a given plan: on a fast link auto would compress nothing."""
    return METHODS if problem is None else METHODS | {"gradwire": "gradwire:qsgd4"}


def _cell(run: BenchRun, method: str) -> Cell:
    cell = next((cell for cell in run.cells if cell.method == method), None)
    if cell is None or cell.step is None:
        raise GradwireError(f"the run has no result for {method}. Run the demo again.")
    return cell


def draw_demo(summary: DemoSummary, path: Path) -> None:
    """Write the PNG. Left: the held-out loss over time. Right: the step, split into compute and exposed exchange.

    Over loopback. Left: the loss over the bytes sent. Right: the bytes of a step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
        model = f"A 6M-parameter transformer on {summary.nodes} nodes"
        if summary.problem is None:
            figure.suptitle(f"{model}, {summary.link}:\ngradwire takes {summary.speedup:.1f} times as many steps as plain DDP")
            _draw_loss(left, summary)
            _draw_split(right, summary.methods)
        else:
            figure.suptitle(f"{model}:\ngradwire sends {summary.bytes_ratio:.1f} times fewer bytes than plain DDP")
            _draw_loss_by_bytes(left, summary.methods)
            _draw_bytes(right, summary.methods)
        save(figure, path)
        pyplot.close(figure)


def _draw_loss(axes: Any, summary: DemoSummary) -> None:
    for name in COLOURS:
        _curve(axes, name, *zip(*summary.methods[name].held_out, strict=True))
    ddp = summary.methods["ddp"]
    if summary.passed_s is not None:
        axes.axhline(ddp.last_loss, color=GREY, linewidth=1, linestyle=":")
        axes.plot([summary.passed_s], [ddp.last_loss], "o", color=BLUE, markersize=8)
        axes.annotate(
            f"DDP's last loss,\nafter {summary.passed_s:.0f} s instead of {ddp.seconds:.0f}",
            (summary.passed_s, ddp.last_loss),
            (0.3, 0.6),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "->", "color": "black"},
        )
    axes.set_xlabel("seconds of training, from the first step")
    axes.set_title("Held-out loss", loc="left", fontsize=12)


def _draw_loss_by_bytes(axes: Any, methods: Mapping[str, DemoMethod]) -> None:
    for name in COLOURS:
        method = methods[name]
        megabytes = method.bytes_per_step * method.steps / 1e6 / method.seconds  # per second
        _curve(axes, name, [megabytes * seconds for seconds, _ in method.held_out], [x for _, x in method.held_out])
    axes.set_xlabel("MB sent by a rank")
    axes.set_title("Held-out loss", loc="left", fontsize=12)


def _curve(axes: Any, name: str, along: Any, loss: Any) -> None:
    axes.plot(along, loss, "-" if name == "gradwire" else "--", color=COLOURS[name], linewidth=2.2, label=LABELS[name])
    axes.set_xlim(left=0)
    axes.legend(frameon=False)


def _draw_split(axes: Any, methods: Mapping[str, DemoMethod]) -> None:
    compute_ms = methods["floor"].step_ms
    compute = [min(compute_ms, method.step_ms) for method in methods.values()]
    exposed = [method.step_ms - part for method, part in zip(methods.values(), compute, strict=True)]
    labels = [LABELS[name] for name in methods]
    hatched = {"color": YELLOW, "hatch": "//", "edgecolor": "black"}
    axes.bar(labels, compute, color=GREY, width=0.6, label="compute")
    axes.bar(labels, exposed, bottom=compute, width=0.6, label="exposed exchange", **hatched)
    _number(axes, [method.step_ms for method in methods.values()], "{:.0f}")
    axes.set_ylabel("milliseconds a step")
    axes.set_title("Where a step's time goes", loc="left", fontsize=12)
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _draw_bytes(axes: Any, methods: Mapping[str, DemoMethod]) -> None:
    sent = [methods[name].bytes_per_step / 1e6 for name in COLOURS]
    axes.bar([LABELS[name] for name in COLOURS], sent, color=list(COLOURS.values()), width=0.6)
    _number(axes, sent, "{:.1f}")
    axes.set_ylabel("MB sent a step")
    axes.set_title("What a rank sends", loc="left", fontsize=12)


def _number(axes: Any, totals: list[float], words: str) -> None:
    """Write each bar's number above the bar."""
    for position, total in enumerate(totals):
        axes.annotate(words.format(total), (position, total), (0, 4), textcoords="offset points", ha="center")
    axes.set_ylim(0, 1.25 * max(totals))
