"""Draws bars as small PNGs, to go with the curves of `gradwire.report.pictures`: every kind of bar has its own colour
and hatch."""

from collections.abc import Sequence
from pathlib import Path

from gradwire.report.pictures import COLOURS, Panel, canvas, looks_of

HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++", "**")


def draw_bars(path: Path, title: str, panels: Sequence[Panel], y_label: str, stacked: bool = False) -> None:
    """Groups of bars side by side, or, `stacked`, one bar a group made of its values. Raises FormatError as `draw_lines`."""
    looks = looks_of(panels)
    with canvas(path, title, panels, "", y_label) as grid:
        for axes, panel in zip(grid, panels, strict=True):
            count = 1 if stacked else len(panel.curves)
            bottoms = [0.0] * len(panel.x)
            for place, (label, values) in enumerate(panel.curves.items()):
                look = looks[label] % len(COLOURS)
                shift = 0.0 if stacked else 0.8 * ((place + 0.5) / count - 0.5)
                axes.bar(
                    [group + shift for group in range(len(panel.x))],
                    values,
                    0.6 if stacked else 0.8 / count,
                    bottom=bottoms if stacked else 0.0,
                    label=label,
                    color=COLOURS[look],
                    hatch=HATCHES[look],
                    edgecolor="white" if look == len(COLOURS) - 2 else "black",
                    linewidth=0.6,
                )
                bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
            axes.set_xticks(range(len(panel.x)), [str(name) for name in panel.x])
