"""Draws one step, predicted and measured side by side: a track for each resource, on a common time axis."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gradwire.core import Cluster, Costs, Profile
from gradwire.errors import GradwireError
from gradwire.record import Run
from gradwire.report.charts import percent, ticks
from gradwire.report.html import Element, counted, milliseconds, short, tag
from gradwire.sim import Timeline, simulate

KINDS = {
    "optimizer": "optimizer",
    "forward": "forward",
    "backward": "backward",
    "comp": "encode",
    "decomp": "decode",
    "launch": "launch",
    "fetch": "copy",
    "put": "copy",
    "allreduce": "all-reduce",
    "alltoall": "reduce phase",
    "reducescatter": "reduce phase",
    "reduce": "reduce phase",
    "gather": "reduce phase",
    "allgather": "gather phase",
    "broadcast": "gather phase",
    "rowscatter": "reduce phase",
    "columnscatter": "reduce phase",
    "columngather": "gather phase",
    "rowgather": "gather phase",
}
"""The page's name for each task. Tasks with equal names look alike."""
MOST_TRACKS = 4
NARROW = 0.002
"""Share of the step's length. Narrower pieces are joined with a neighbour of their kind."""
PARTED, LABELLED = 0.005, 0.04
"""Shares of the step's length. Wider pieces get a border, and the number of their bucket."""


class Predicted(NamedTuple):
    """A timeline, or the reason why there is none."""

    timeline: Timeline | None
    why_not: str = ""


def a_round(run: Run) -> str:
    """Return the name of what ends with an exchange of all buckets.

    In the `local` schedule this is "a round of 30 local steps", in others "a step".
    """
    return "a step" if run.round_steps == 1 else f"a round of {run.round_steps} local steps"


def predicted(run: Run, folder: Path) -> Predicted:
    """Simulate the run's plan with the profile.json, cluster.json and costs.json of the folder."""
    if not (folder / "profile.json").exists():
        return Predicted(
            None,
            "The step was not predicted: the folder has no profile.json. Record under plan='auto', or call handle.profile() with "
            "the run's folder before handle.record().",
        )
    try:
        profile, cluster = Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.json")
        if (other := _other_cluster(cluster, run)) is not None:
            return Predicted(None, other)
        costs = Costs.load(folder / "costs.json") if (folder / "costs.json").exists() else Costs(codecs=())
        return Predicted(simulate(run.plan, profile, cluster, costs))
    except GradwireError as error:
        return Predicted(None, f"The step was not predicted: {error}")


def _other_cluster(cluster: Cluster, run: Run) -> str | None:
    """Return the reason why the run was not on this cluster, if its ranks or nodes are others."""
    fewest = cluster.nodes + cluster.ranks_per_node - 1 if cluster.uneven else cluster.world_size
    if cluster.nodes == run.nodes and fewest <= run.world_size <= cluster.world_size:
        return None
    up_to = "up to " * cluster.uneven
    described, made = (
        f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"
        for ranks, nodes in ((cluster.world_size, cluster.nodes), (run.world_size, run.nodes))
    )
    return (
        f"The step was not predicted: cluster.json describes {up_to}{described}, and the run had {made}. Profile again with as "
        "many ranks and nodes."
    )


_LEAST_US = 1e-3
"""Shortest step that has a length to draw, in microseconds."""


class _Span(NamedTuple):
    kind: str
    start_us: float
    end_us: float
    text: str
    label: str


def step_figure(predicted: Timeline | None, measured: Timeline | None) -> Element:
    """Draw the tracks of the given timelines, at least one."""
    shown = _shown(predicted, measured)
    lengths = [t.length_us for _, t in shown] + [e.end_us for _, t in shown for e in t.events]
    length = max(lengths) if max(lengths) > _LEAST_US else 1.0
    first = "first " * any(t.steps > 1 for _, t in shown)
    lanes, kinds = [], set()
    for row in ("compute", "codec", "intra link", "inter link"):
        for name, timeline in shown:
            pieces = _joined(sorted(_pieces(timeline, row), key=lambda piece: piece.start_us), length)
            if pieces:
                kinds |= {piece.kind for piece in pieces}
                lanes.append(tag("div", tag("span", row, " ", tag("em", name)), _track(pieces, length), class_="lane"))
    marks = [tag("span", short(value / 1e3), style=f"left:{percent(value, length)}") for value in ticks(0.0, length)]
    keys = [
        tag("span", tag("i", class_=f"swatch {_class(kind)}"), f" {kind}", class_="key")
        for kind in dict.fromkeys([*KINDS.values(), "other"])
        if kind in kinds
    ]
    return tag(
        "figure",
        tag("figcaption", *keys),
        tag("div", *lanes, tag("div", tag("span"), tag("div", *marks, class_="x"), class_="lane"), class_="lanes"),
        tag("div", f"milliseconds from the start of the {first}step", class_="unit right"),
    )


def batches_of(timeline: Timeline) -> int:
    """Return the number of forwards of a step that a backward follows: more than one where gradients are accumulated."""
    computed = [event.what for event in timeline.events if event.what in ("forward", "backward")]
    return round(sum(pair == ("forward", "backward") for pair in pairwise(computed)) / max(1, timeline.steps))


def step_table(predicted: Timeline | None, measured: Timeline | None) -> Element:
    """Make a table of the step's parts, with a column for each given timeline."""
    shown = _shown(predicted, measured)
    rows = {
        "step": "step_us",
        "optimizer": "optimizer_us",
        "forward": "forward_us",
        "backward": "backward_us",
        "exposed communication": "exposed_comm_us",
        "exposed encodes and decodes": "exposed_codec_us",
        "idle": "idle_us",
    }
    head = tag("tr", tag("th", "per step"), *(tag("th", name) for name, _ in shown))
    body = []
    for what, field in rows.items():
        times = [getattr(t, field) / (1 if field == "step_us" else max(1, t.steps)) for _, t in shown]
        body.append(tag("tr", tag("th", what), *(tag("td", milliseconds(us)) for us in times)))
    return tag("table", tag("thead", head), tag("tbody", *body))


def _shown(predicted: Timeline | None, measured: Timeline | None) -> list[tuple[str, Timeline]]:
    return [(name, t) for name, t in (("predicted", predicted), ("measured", measured)) if t is not None]


def _pieces(timeline: Timeline, row: str) -> Iterator[_Span]:
    for event in timeline.events:
        own_work = event.bucket >= 0 and not event.resource.endswith("link")
        if row == ("codec" if own_work else event.resource) and event.end_us > event.start_us:
            times = f"{milliseconds(event.start_us)} to {milliseconds(event.end_us)}"
            name, label = f"{event.what} {event.tensor}".rstrip(), ""
            if event.bucket >= 0:
                name = f"{event.what}, bucket {event.bucket}" + f", chunk {event.chunk}" * (event.chunk > 0)
                label = str(event.bucket)
            yield _Span(KINDS.get(event.what, "other"), event.start_us, event.end_us, f"{name}: {times}", label)


def _joined(pieces: Sequence[_Span], length: float) -> list[_Span]:
    """Join narrow neighbours of one kind, so that the page of a large model stays small."""
    result: list[_Span] = []
    for piece in pieces:
        last = result[-1] if result else piece
        gap = piece.start_us - last.end_us
        narrow = min(piece.end_us - piece.start_us, gap) < NARROW * length
        alike = last.kind == piece.kind and (not piece.label or last.label == piece.label)
        if result and alike and narrow and 0 <= gap < NARROW * length:
            text = last.text.partition(" … ")[0] + " … " + piece.text
            result[-1] = last._replace(end_us=piece.end_us, text=text)
        else:
            result.append(piece)
    return result


def _track(pieces: Sequence[_Span], length: float) -> Element:
    """Draw a track. Simultaneous pieces, such as those of several lanes, get rows of their own."""
    free_at: list[float] = []
    placed: list[tuple[int, _Span]] = []
    for piece in pieces:
        place = next((at for at, time in enumerate(free_at) if time <= piece.start_us), len(free_at))
        free_at[place : place + 1] = [piece.end_us]
        placed.append((min(place, MOST_TRACKS - 1), piece))
    rows = min(len(free_at), MOST_TRACKS)
    track = tag("div", class_="track", style=f"--rows:{rows}")
    for place, piece in placed:
        part = (piece.end_us - piece.start_us) / length
        style = f"left:{percent(piece.start_us, length)};width:{percent(part, 1.0)};--row:{place}"
        label = [tag("b", piece.label)] if piece.label and part > LABELLED else []
        look = _class(piece.kind) + " wide" * (part > PARTED)
        track.append(tag("i", *label, class_=look, style=style, title=piece.text))
    return track


def _class(kind: str) -> str:
    return "k-" + kind.replace(" ", "-")
