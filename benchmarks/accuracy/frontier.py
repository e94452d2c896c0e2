"""The frontier of loss and bytes: gradwire's specs beside other systems on four ranks, in docs/compressors.md.

python -m benchmarks accuracy --jobs transformer,tied --ranks 4 --seeds 3 --specs FORMS --out benchmarks/results/accuracy.jsonl
python -m benchmarks accuracy --frontier --out benchmarks/results/accuracy.jsonl
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import markdown
from benchmarks.accuracy.forms import form_of
from benchmarks.accuracy.jobs import job_of
from benchmarks.common import write_between
from benchmarks.paired import interval
from gradwire.core import ElementRun
from gradwire.report.pictures import COLOURS, Panel, canvas

__all__ = ["FORMS", "write_frontier"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "compressors.md", DOCS / "pictures" / "frontier.png"
BEGIN, END = "<!-- frontier: made by `python -m benchmarks accuracy --frontier` -->", "<!-- end of frontier -->"
RANKS, STEPS, LEAST_SEEDS = 4, 200, 3
JOBS = ("transformer", "tied")
FORMS = {
    "weighted4": "2 bits: four levels, weights, feedback",
    "weighted8": "3 bits: eight levels, weights, feedback",
    "today4": "4 bits",
    "weighted3": "2 bits: three levels, weights, feedback",
    "today2": "2 bits, feedback",
    "today3": "3 bits, feedback",
    "feedback4": "4 bits, feedback",
    "EFSignSGD()": "EF-SignSGD",
    "PowerSGD(rank=1)": "PowerSGD, rank 1, as PyTorch's hook",
    "PowerSGD(rank=4)": "PowerSGD, rank 4, as PyTorch's hook",
    "PowerSGD(rank=16)": "PowerSGD, rank 16, as PyTorch's hook",
    "loco": "LoCo",
    "onebit-adam": "one-bit Adam",
    "demo32": "DeMo, 32 components",
    "demo128": "DeMo, 128 components",
    "demo4096": "DeMo, all components",
}
"""The forms and their names in the page."""
RIVALS = ("loco", "onebit-adam", "demo")
"""How the forms of other systems begin. PyTorch's PowerSGD hook has its like in gradwire."""
ABOUT = (
    f"Held-out loss after {STEPS} steps over that of exact sums, {RANKS} ranks, in percent with 95 % intervals by Student's t; "
    "the seeds are in brackets. Bytes are those of an element of a matrix, in the mean of the two encodes. A system that gathers "
    "has those that a rank receives."
)


class Point(NamedTuple):
    """A form in a job. loss: percent over exact sums."""

    bytes_an_element: float
    loss: float
    width: float
    seeds: int


def write_frontier(trainings: Sequence[Mapping[str, Any]]) -> None:
    """Write the table and the picture."""
    points = points_of(trainings)
    write_between(PAGE, BEGIN, END, [ABOUT, "", *_table(points), "", _verdict(points)])
    _draw(points)


def points_of(trainings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Point]]:
    """The points of each job by form, of forms with enough seeds."""
    found: dict[str, dict[str, Point]] = {}
    for job in JOBS:
        own = [each for each in trainings if (each["job"], each["ranks"], each["steps"]) == (job, RANKS, STEPS)]
        matrices = [each.shape for each in job_of(job, 0).make_model(0).parameters() if each.ndim > 1]
        runs = [ElementRun(shape.numel(), 0, tuple(shape)) for shape in matrices]
        for form in FORMS:
            if len(percent := over_exact(own, form)) >= LEAST_SEEDS:
                size = form_of(form).bytes_an_element(runs)
                found.setdefault(job, {})[form] = Point(size, *interval(percent), len(percent))
    return found


def over_exact(trainings: Sequence[Mapping[str, Any]], form: str) -> list[float]:
    """The loss of a form over that of exact sums in percent, for each seed, from the trainings of one job and number of ranks."""
    exact = {each["seed"]: each["loss"] for each in trainings if each["form"] == "exact"}
    own = [each for each in trainings if each["form"] == form and each["seed"] in exact]
    return [100 * (each["loss"] / exact[each["seed"]] - 1) for each in own]


def below(points: Mapping[str, Point], rival: str) -> bool:
    """Whether a rival is below gradwire's curve: each own spec with at most its bytes loses more, beyond both intervals."""
    point = points[rival]
    fitting = [
        own for form, own in points.items() if not form.startswith(RIVALS) and own.bytes_an_element <= point.bytes_an_element
    ]
    return all(own.loss - own.width > point.loss + point.width for own in fitting)


def _table(points: Mapping[str, Mapping[str, Point]]) -> list[str]:
    rows = []
    for form, name in FORMS.items():
        cells = [points.get(job, {}).get(form) for job in JOBS]
        if any(cells):
            shown = [cell for each in cells for cell in _cells(each)]
            rows.append((name, "another system" if form.startswith(RIVALS) else "gradwire", *shown))
    head = ["form", "of", *(title for job in JOBS for title in (f"bytes, {job}", f"loss, {job}"))]
    return markdown.table(head, rows, left=2)


def _cells(point: Point | None) -> tuple[str, str]:
    return (
        ("-", "-")
        if point is None
        else (f"{point.bytes_an_element:.3f}", f"{point.loss:+.2f} ± {point.width:.2f} ({point.seeds})")
    )


def _verdict(points: Mapping[str, Mapping[str, Point]]) -> str:
    """What is between 0.1 and 1 byte."""
    rivals = [(job, form) for job, own in points.items() for form in own if form.startswith(RIVALS)]
    lower = [
        f"{FORMS[form]} on {job}"
        for job, form in rivals
        if 0.1 <= points[job][form].bytes_an_element <= 1 and below(points[job], form)
    ]
    return (
        "Between 0.1 and 1 byte an element another system is below gradwire's curve if each spec of gradwire with at most its "
        f"bytes loses more, beyond both intervals: {', '.join(lower) or 'none is'}."
    )


def _draw(points: Mapping[str, Mapping[str, Point]]) -> None:
    panels = [Panel(job, [], {FORMS[form]: [] for form in own}) for job, own in points.items()]
    with canvas(PICTURE, f"{RANKS} ranks, {STEPS} steps", panels, "bytes an element", "loss over exact sums, %") as grid:
        for axes, own in zip(grid, points.values(), strict=True):
            for place, (form, name) in enumerate(FORMS.items()):
                if form in own:
                    look = {"color": COLOURS[place % len(COLOURS)], "marker": "x" if form.startswith(RIVALS) else "o"}
                    axes.errorbar(*own[form][:3], label=name, linestyle="", capsize=3, **look)
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=1)
