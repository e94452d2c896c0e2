"""The demo's picture: the loss over time, and the parts of a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire.report.pictures import save

if TYPE_CHECKING:
    from gradwire.bench.demo import DemoCurve, DemoSummary

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart
BLUE, VERMILION, YELLOW, GREY = "#0072B2", "#D55E00", "#F0E442", "#999999"
COLOURS = {"ddp": VERMILION, "gradwire": BLUE}
LABELS = {"floor": "no\ncommunication", "ddp": "plain DDP", "gradwire": "gradwire"}
SMOOTHED_STEPS = 10
"""The drawn loss is the mean over so many steps."""


def draw_demo(summary: "DemoSummary", curves: "Mapping[str, DemoCurve]", path: Path) -> None:
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


def _draw_loss(axes: Any, curves: "Mapping[str, DemoCurve]", speed: str) -> None:
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


def _draw_split(axes: Any, summary: "DemoSummary", speed: str) -> None:
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
