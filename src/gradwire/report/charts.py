"""Draws line charts and bars that fit any width. Drawings stretch; text keeps its size.

Every curve has its own dash and a label, and every kind of bar a pattern, so that no chart relies on colours alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.report.html import Element, short, tag

STYLES = (
    ("#0072B2", "", 2.5),
    ("#D55E00", "7 4", 2.0),
    ("#000000", "2 3", 2.0),
    ("#767676", "10 3 2 3", 2.0),
    ("#8A4B78", "4 2", 1.5),
)
"""Colours of Okabe and Ito's palette that are dark enough on white, with dashes and widths."""
MOST_POINTS = 600
_BOX = 1000


class Curve(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]


class Bar(NamedTuple):
    label: str
    value: str
    """The text behind the bar."""
    parts: Sequence[tuple[str, float]]
    """Pairs of a pattern (a class of the style sheet) and a length."""
    outline: float = 0.0
    """Length of a hollow bar around the parts; 0 for none."""


def line_chart(title: str, x_label: str, y_label: str, curves: Sequence[Curve]) -> Element:
    """Draw a chart of curves. At least one curve has a point."""
    if len(curves) > len(STYLES):
        raise ValueError(f"{len(curves)} curves in {title!r}: there are only {len(STYLES)} styles.")
    strides = [max(1, -(-len(curve.x) // MOST_POINTS)) for curve in curves]
    curves = [Curve(c.label, c.x[::-1][::by][::-1], c.y[::-1][::by][::-1]) for c, by in zip(curves, strides, strict=True)]
    x_low, x_high = _range([value for curve in curves for value in curve.x])
    y_low, y_high = _range([value for curve in curves for value in curve.y])
    drawing = tag("svg", viewBox=f"0 0 {_BOX} {_BOX}", preserveAspectRatio="none", aria_hidden="true")
    y_ticks, x_ticks = ticks(y_low, y_high), ticks(x_low, x_high)
    for value in y_ticks:
        at = _BOX - _BOX * (value - y_low) / (y_high - y_low)
        drawing.append(tag("line", x1=0, x2=_BOX, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
    for curve, (colour, dash, width) in zip(curves, STYLES, strict=False):
        points = " ".join(
            f"{_BOX * (x - x_low) / (x_high - x_low):.1f},{_BOX - _BOX * (y - y_low) / (y_high - y_low):.1f}"
            for x, y in zip(curve.x, curve.y, strict=True)
        )
        if len(curve.x) == 1:  # a polyline of one point is invisible
            points += f" {_BOX},{points.partition(',')[2]}"
        drawing.append(tag("polyline", points=points, stroke=colour, stroke_dasharray=dash or None, stroke_width=width))
    y_axis = [tag("span", short(value), style=f"bottom:{percent(value - y_low, y_high - y_low)}") for value in y_ticks]
    x_axis = [tag("span", short(value), style=f"left:{percent(value - x_low, x_high - x_low)}") for value in x_ticks]
    keys = []
    for curve, (colour, dash, width) in zip(curves, STYLES, strict=False):
        line = tag("line", x1=0, x2=30, y1=5, y2=5, stroke=colour, stroke_dasharray=dash or None, stroke_width=width)
        sample = tag("svg", line, viewBox="0 0 30 10", class_="sample", aria_hidden="true")
        keys.append(tag("span", sample, f" {curve.label}", class_="key"))
    parts = ("y", y_axis), ("plot", [drawing]), ("x", x_axis)
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", *keys),
        tag("div", y_label, class_="unit"),
        tag("div", *(tag("div", *content, class_=name) for name, content in parts), class_="chart"),
        tag("div", x_label, class_="unit right"),
    )


def bars(rows: Sequence[Bar]) -> Element:
    """Draw a list of bars with a common scale."""
    longest = max([max(bar.outline, sum(length for _, length in bar.parts)) for bar in rows], default=0.0) or 1.0
    items = []
    for bar in rows:
        strip = tag("span", class_="strip", aria_hidden="true")
        if bar.outline:
            strip.append(tag("i", class_="outline", style=f"left:0;width:{percent(bar.outline, longest)}"))
        at = 0.0
        for pattern, length in bar.parts:
            if length:
                style = f"left:{percent(at, longest)};width:{percent(length, longest)}"
                strip.append(tag("i", class_=pattern, style=style))
                at += length
        items.append(tag("li", tag("span", bar.label, class_="name"), strip, tag("span", bar.value, class_="value")))
    return tag("ul", *items, class_="bars")


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range.

    >>> ticks(0.0, 100.0), ticks(2.31, 4.2)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [2.5, 3.0, 3.5, 4.0])
    """
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(factor * power - rough))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def percent(part: float, whole: float) -> str:
    """Return a share as a length in CSS.

    >>> percent(1.0, 3.0)
    '33.33%'
    """
    return f"{100 * part / whole:.2f}%"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: the range of the values, with a margin."""
    low, high = min(values), max(values)
    room = (high - low) * 0.02 or abs(high) * 0.05 or 1.0
    return low - (room if low > room else 0.0), high + room
