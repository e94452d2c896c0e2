"""The picture of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from gradwire.planner.sweep import LABELS, SweepRow
from gradwire.report.pictures import Panel, draw_lines


def draw_sweep(rows: Sequence[SweepRow], model: str, path: Path) -> None:
    """Draw scaling factors over the swept values. With two sweeps, the longer one is the axis, the other makes panels."""
    rates, counts = (list(dict.fromkeys(row[field] for row in rows)) for field in (2, 0))
    over_rates = len(rates) > len(counts)
    along, beside = (rates, counts) if over_rates else (counts, rates)
    panels = []
    for value in beside:
        chosen = [row for row in rows if (row.nodes if over_rates else row.inter_gbps) == value]
        curves: dict[str, list[float]] = {}
        for row in chosen:
            curves.setdefault(LABELS[row.method], []).append(row.scaling)
        title = f"{value:g} node{'s' * (value != 1)}" if over_rates else f"{value:g} Gb/s between nodes"
        panels.append(Panel(title, along, curves))
    ranks = rows[0].ranks // rows[0].nodes
    title = f"{model} on nodes of {ranks} ranks, predicted"
    draw_lines(path, title, panels, "Gb/s between nodes" if over_rates else "nodes", "scaling factor (1 = perfect)")
