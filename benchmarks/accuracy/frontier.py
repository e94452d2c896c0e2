"""The frontier of loss and bytes: gradwire's specs beside other systems on four ranks, in docs/compressors.md.

    python -m benchmarks accuracy --jobs transformer,tied --ranks 4 --seeds 3 --specs FORMS --out FILE
    python -m benchmarks accuracy --frontier --out FILE

The first command trains what FILE lacks. The second one writes the table and the picture.
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
from gradwire.exchange import embeddings_of
from gradwire.report.pictures import COLOURS, Panel, canvas

__all__ = ["FORMS", "write_frontier"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "compressors.md", DOCS / "pictures" / "frontier.png"
BEGIN, END = "<!-- frontier: made by `python -m benchmarks accuracy --frontier` -->", "<!-- end of frontier -->"
RANKS, STEPS, LEAST_SEEDS = 4, 200, 3
JOBS = ("transformer", "tied")
FORMS = {
    "weighted3": ("2 bits: three levels, weights, feedback", "3 levels"),
    "weighted4": ("2 bits: four levels, weights, feedback", "4 levels"),
    "weighted8": ("3 bits: eight levels, weights, feedback", "8 levels"),
    "today4": ("4 bits", "4 bits"),
    "today2": ("2 bits, feedback", "2 bits"),
    "today3": ("3 bits, feedback", "3 bits"),
    "feedback4": ("4 bits, feedback", ""),
    "EFSignSGD()": ("EF-SignSGD", "signs"),
    "PowerSGD(rank=1)": ("PowerSGD, rank 1, as PyTorch's hook", "rank 1"),
    "PowerSGD(rank=4)": ("PowerSGD, rank 4, as PyTorch's hook", "rank 4"),
    "PowerSGD(rank=16)": ("PowerSGD, rank 16, as PyTorch's hook", "rank 16"),
    "loco": ("LoCo", "LoCo"),
    "onebit-adam": ("one-bit Adam", "one-bit Adam"),
    "demo32": ("DeMo, 32 components", "DeMo 32"),
    "demo128": ("DeMo, 128 components", "DeMo 128"),
    "demo4096": ("DeMo, all components", "DeMo, all"),
}
"""The forms, and their names in the table and in the picture."""
RIVALS = ("loco", "onebit-adam", "demo")
"""How the forms of other systems begin. PyTorch's PowerSGD hook has its like in gradwire."""
ABOUT = (
    f"Held-out loss after {STEPS} steps over that of exact sums, {RANKS} ranks, in percent with 95 % intervals by Student's t. "
    "The seeds are in brackets. Bytes are those of an element of a matrix, in the mean of the two encodes. A system that gathers "
    "has those that a rank receives. The first steps with more bytes are left out, since their number is fixed: 20 with weights, "
    "10 of PowerSGD. One-bit Adam's are a quarter of all steps, and count."
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
        model = job_of(job, 0).make_model(0)
        embeddings, matrices = embeddings_of(model), [each for each in model.parameters() if each.ndim > 1]
        parts = [[each for each in matrices if (id(each) in embeddings) == looked_up] for looked_up in (False, True)]
        runs, of_embeddings = ([ElementRun(each.numel(), 0, tuple(each.shape)) for each in part] for part in parts)
        for form in FORMS:
            if len(percent := over_exact(own, form)) >= LEAST_SEEDS:
                found.setdefault(job, {})[form] = Point(_size(form, runs, of_embeddings), *interval(percent), len(percent))
    return found


def _size(form: str, runs: Sequence[ElementRun], embeddings: Sequence[ElementRun]) -> float:
    """The bytes of an element of the embeddings and the other runs. Embeddings go by 4 bits where a spec has no code for zero."""
    own = form_of(form)
    if own.rival or own.spec.keeps_zeros:
        return own.bytes_an_element([*runs, *embeddings])
    parts = (own, runs), (form_of("today4"), embeddings)
    counts = [sum(run.numel for run in part) for _, part in parts]
    return sum(each.bytes_an_element(part) * count for (each, part), count in zip(parts, counts, strict=True)) / sum(counts)


def over_exact(trainings: Sequence[Mapping[str, Any]], form: str) -> list[float]:
    """The loss of a form over that of exact sums in percent, for each seed, from the trainings of one job and number of ranks."""
    return [percent for _, percent in compared(trainings, form)]


def compared(
    trainings: Sequence[Mapping[str, Any]], form: str, reference: str = "exact"
) -> list[tuple[Mapping[str, Any], float]]:
    """The trainings of a form whose seed has one of the reference, each with its loss over that one in percent."""
    losses = {each["seed"]: each["loss"] for each in trainings if each["form"] == reference}
    own = [each for each in trainings if each["form"] == form and each["seed"] in losses]
    return [(each, 100 * (each["loss"] / losses[each["seed"]] - 1)) for each in own]


def below(points: Mapping[str, Point], rival: str) -> bool:
    """Whether a rival is below gradwire's curve: the best own spec with at most its bytes loses more, beyond both intervals."""
    point = points[rival]
    own_forms = [each for form, each in points.items() if not form.startswith(RIVALS)]
    fitting = [own for own in own_forms if own.bytes_an_element <= point.bytes_an_element]
    best = min(fitting, key=lambda own: own.loss, default=None)
    return best is None or best.loss - best.width > point.loss + point.width


def _table(points: Mapping[str, Mapping[str, Point]]) -> list[str]:
    rows = []
    for form, (name, _) in FORMS.items():
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
        f"{FORMS[form][0]} on {job}"
        for job, form in rivals
        if 0.1 <= points[job][form].bytes_an_element <= 1 and below(points[job], form)
    ]
    return (
        "Another system is below gradwire's curve if the best spec of gradwire with at most its bytes loses more, beyond both "
        f"intervals. Between 0.1 and 1 byte an element these are: {', '.join(lower) or 'none'}."
    )


def _draw(points: Mapping[str, Mapping[str, Point]]) -> None:
    """Draw one mark for each form. The specs with weights, which auto may choose, are joined."""
    panels = [Panel(job, [], {}) for job in points]
    with canvas(PICTURE, f"{RANKS} ranks, {STEPS} steps", panels, "bytes an element", "loss over exact sums, %") as grid:
        for axes, own in zip(grid, points.values(), strict=True):
            groups: dict[str, list[str]] = {"gradwire, with weights": [], "gradwire": [], "other systems": []}
            for form in own:
                kind = "other systems" if form.startswith(RIVALS) else "gradwire"
                groups["gradwire, with weights" if form.startswith("weighted") else kind].append(form)
            for (label, forms), colour, style in zip(groups.items(), COLOURS[3::2], ("o-", "o", "x"), strict=False):
                places = [own[form][:3] for form in forms]
                axes.errorbar(*zip(*places, strict=True), fmt=style, label=label, color=colour, capsize=2, markersize=5)
                for form, (x, y, _) in zip(forms, places, strict=True):
                    offset = (4, -9) if form.startswith(("PowerSGD", *RIVALS)) else (4, 4)
                    axes.annotate(FORMS[form][1], (x, y), offset, textcoords="offset points", fontsize=7)
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=1)
            axes.set_yticks([-1, 0, 1, 10], ["-1", "0", "1", "10"])
            axes.set_xticks([0.1, 0.3, 1, 4], ["0.1", "0.3", "1", "4"])
            axes.minorticks_off()
