"""Draws curves as PNGs that are readable at half a page's width. Every curve has its own colour, marker and line style."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.core import show, write_whole
from gradwire.errors import FormatError, GradwireError
from gradwire.planner import LABELS, SweepRow

# Okabe and Ito's palette, made for all kinds of colour vision, and one more
COLOURS = ("#D55E00", "#999999", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#000000", "#56B4E9", "#882255")
MARKERS = ("o", "v", "s", "^", "D", "*", "", "x", "P")
STYLES = ("--", ":", "-.", "-", ":", "-", "-", "--", "-.")
LOOK: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
}
MOST_PANELS = 9


class Panel(NamedTuple):
    title: str
    x: Sequence[float | str]
    """Positions of points, or names of groups of bars."""
    curves: Mapping[str, Sequence[float]]
    """A value for each x, by label. A label has the same look in all panels."""


def check_picture(path: Path, panels: int = 1) -> None:
    """Check before the computation that a picture can be drawn.

    Raises FormatError for a file that is no .png, a missing folder or too many panels; GradwireError without matplotlib.
    """
    _check_panels(panels)
    if path.suffix.lower() != ".png":
        raise FormatError(f"--picture is {show(str(path))}: a picture is a PNG file. Use a name that ends with .png.")
    if not path.parent.is_dir():
        raise FormatError(f"--picture is {show(str(path))}: there is no folder {show(str(path.parent))}. Create the folder.")
    if find_spec("matplotlib") is None:
        raise GradwireError(f"--picture {path} needs matplotlib, which is not installed. Run: pip install matplotlib")


def draw_lines(path: Path, title: str, panels: Sequence[Panel], x_label: str, y_label: str, logarithmic: bool = False) -> None:
    """Draw curves over a logarithmic x axis and a y axis from 0, or a logarithmic one. Raises FormatError for too many panels."""
    looks = looks_of(panels)
    with canvas(path, title, panels, x_label, y_label) as grid:
        for axes, panel in zip(grid, panels, strict=True):
            for label, values in panel.curves.items():
                look = looks[label] % len(COLOURS)
                style = {"color": COLOURS[look], "marker": MARKERS[look], "markersize": 7, "linewidth": 1.8}
                axes.plot(panel.x, values, STYLES[look], label=label, **style)
            axes.set_xscale("log", base=2)
            ticks = list(panel.x)[:: 1 + (len(panel.x) - 1) // 7]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            if logarithmic:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)


def draw_sweep(rows: Sequence[SweepRow], model: str, path: Path) -> None:
    """Draw scaling factors over the swept values. With two sweeps, the longer one is the axis, the other makes panels."""
    rates, counts = (list(dict.fromkeys(row[field] for row in rows)) for field in (2, 0))
    over_rates = len(rates) > len(counts)
    along, by_panel = (rates, counts) if over_rates else (counts, rates)
    panels = []
    for value in by_panel:
        chosen = [row for row in rows if (row.nodes if over_rates else row.inter_gbps) == value]
        curves: dict[str, list[float]] = {}
        for row in chosen:
            curves.setdefault(LABELS[row.method], []).append(row.scaling)
        title = f"{value:g} node{'s' * (value != 1)}" if over_rates else f"{value:g} Gb/s between nodes"
        panels.append(Panel(title, along, curves))
    ranks = rows[0].ranks // rows[0].nodes
    title = f"{model} on nodes of {ranks} ranks, predicted"
    draw_lines(path, title, panels, "Gb/s between nodes" if over_rates else "nodes", "scaling factor (1 = perfect)")


def save(figure: Any, path: Path, dpi: int = 150, colours: int | None = None) -> None:
    """Write a figure as PNG. A limit on the number of colours makes drawings several times smaller."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    if colours is not None:
        from PIL import Image

        reduced = Image.open(drawn).convert("RGB").quantize(colours)
        drawn = io.BytesIO()
        reduced.save(drawn, format="png", optimize=True)
    write_whole(path, drawn.getvalue())


@contextmanager
def canvas(path: Path, title: str, panels: Sequence[Panel], x_label: str, y_label: str) -> Iterator[list[Any]]:
    """Yield the axes of the panels in reading order. On exit, add labels and a common legend, and write the picture."""
    _check_panels(len(panels))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    with pyplot.rc_context(LOOK):
        size = (max(6.0, 3.4 * across), 3.1 * down + 1.3)
        figure, grid = pyplot.subplots(down, across, figsize=size, layout="constrained", sharey=True, squeeze=False)
        figure.suptitle(title, fontsize=12)
        found = list(grid.flat)
        for unused in found[len(panels) :]:
            unused.set_visible(False)
        yield found[: len(panels)]
        labels: dict[str, Any] = {}
        for axes, panel in zip(found, panels, strict=False):
            axes.set_title(panel.title, loc="left", fontsize=11)
            axes.set_xlabel(x_label)
            if axes.get_subplotspec().is_first_col():
                axes.set_ylabel(y_label)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        columns = max(1, int(size[0] / (0.5 + 0.085 * max(map(len, labels)))))
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
        save(figure, path, dpi=100, colours=64)
        pyplot.close(figure)


def _check_panels(panels: int) -> None:
    if not 0 < panels <= MOST_PANELS:
        raise FormatError(
            f"the picture has {panels} panels, and the limit is {MOST_PANELS}. Give fewer rates or fewer numbers of nodes."
        )


def looks_of(panels: Sequence[Panel]) -> dict[str, int]:
    """Return the index of the style of each label, in order of first use."""
    labels = dict.fromkeys(label for panel in panels for label in panel.curves)
    return {label: place for place, label in enumerate(labels)}
