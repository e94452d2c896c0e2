"""Draws the pictures of docs/concepts/networks.md: `python docs/pictures/draw.py` writes the SVG files beside this one.

Times are made up. A layer's forward takes 1, its backward 2; a bucket's reduce phase takes 2, its gather phase 2.
"""

from pathlib import Path
from typing import NamedTuple

BUCKETS = 3
FORWARD, BACKWARD, REDUCE, GATHER = 1.0, 2.0, 2.0, 2.0
UNIT, HEIGHT, LEFT, GAP = 22, 22, 150, 14
COLOURS = {"forward": "#9ecae1", "backward": "#6baed6", "reduce": "#fdae6b", "gather": "#fdd0a2", "weights": "#a1d99b"}
NAMES = "ABC"


class Box(NamedTuple):
    """One thing that happens."""

    row: str
    start: float
    length: float
    kind: str
    text: str


def svg(rows: list[str], boxes: list[Box], title: str, legend: list[str]) -> str:
    """A timeline with one line for each row."""
    width = LEFT + round(UNIT * max(box.start + box.length for box in boxes)) + 20
    top, bottom = 10, 10 + len(rows) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 36}" font-family="sans-serif" '
        f'font-size="12" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{bottom + 36}" fill="#ffffff"/>',
    ]
    for index, row in enumerate(rows):
        parts.append(f'<text x="8" y="{top + index * (HEIGHT + GAP) + 15}" fill="#333333">{row}</text>')
    for box in boxes:
        x, y = LEFT + UNIT * box.start, top + rows.index(box.row) * (HEIGHT + GAP)
        parts.append(
            f'<rect x="{x:g}" y="{y}" width="{UNIT * box.length - 2:g}" height="{HEIGHT}" fill="{COLOURS[box.kind]}" '
            f'stroke="#555555" stroke-width="0.5"/>'
            f'<text x="{x + UNIT * box.length / 2 - 1:g}" y="{y + 15}" text-anchor="middle" fill="#111111">{box.text}</text>'
        )
    for index, kind in enumerate(legend):
        x = LEFT + 130 * index
        parts.append(
            f'<rect x="{x}" y="{bottom + 10}" width="14" height="14" fill="{COLOURS[kind]}" stroke="#555555" stroke-width="0.5"/>'
            f'<text x="{x + 20}" y="{bottom + 21}" fill="#333333">{kind} {LEGEND[kind]}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


LEGEND = {"forward": "", "backward": "", "reduce": "phase", "gather": "phase", "weights": "exchanged"}


def compute(row: str, start: float) -> tuple[list[Box], list[float], float]:
    """Forward and backward of one step: boxes, when each bucket is ready, and the end. Bucket A belongs to the last layer."""
    layers = [Box(row, start + i * FORWARD, FORWARD, "forward", NAMES[BUCKETS - 1 - i]) for i in range(BUCKETS)]
    begin = start + BUCKETS * FORWARD
    backs = [Box(row, begin + i * BACKWARD, BACKWARD, "backward", NAMES[i]) for i in range(BUCKETS)]
    ready = [box.start + box.length for box in backs]
    return layers + backs, ready, ready[-1]


def after(ready: list[float], row: str, free: float, kinds: list[tuple[str, float]]) -> list[Box]:
    """Buckets one after the other on the network, each with its phases, none before it is ready."""
    boxes = []
    for name, when in zip(NAMES, ready, strict=True):
        for kind, length in kinds:
            start = max(free, when)
            boxes.append(Box(row, start, length, kind, name))
            free = when = start + length
    return boxes


WHOLE = [("reduce", REDUCE), ("gather", GATHER)]


def schedules() -> str:
    """Two steps under each schedule."""
    boxes: list[Box] = []
    rows: list[str] = []

    def pair(name: str) -> tuple[str, str]:
        rows.extend((name, f"{name}: network"))
        return rows[-2], rows[-1]

    row, net = pair("nothing overlaps")
    start = 0.0
    for _ in range(2):
        work, _, end = compute(row, start)
        sent = after([end] * BUCKETS, net, end, WHOLE)
        boxes += work + sent
        start = sent[-1].start + sent[-1].length

    row, net = pair("backward")
    start = 0.0
    for _ in range(2):
        work, ready, _ = compute(row, start)
        sent = after(ready, net, start, WHOLE)
        boxes += work + sent
        start = sent[-1].start + sent[-1].length

    row, net = pair("pipelined")
    work, ready, end = compute(row, 0.0)
    sent = after(ready, net, 0.0, [("reduce", REDUCE)])
    free = sent[-1].start + sent[-1].length
    gathered = [Box(net, free + i * GATHER, GATHER, "gather", NAMES[BUCKETS - 1 - i]) for i in range(BUCKETS)]
    boxes += work + sent + gathered
    begin = 0.0
    for box in gathered:  # the next forward: each layer when its bucket is there
        begin = max(begin, box.start + box.length)
        boxes.append(Box(row, begin, FORWARD, "forward", box.text))
        begin += FORWARD
    backs = [Box(row, begin + i * BACKWARD, BACKWARD, "backward", NAMES[i]) for i in range(BUCKETS)]
    boxes += backs
    boxes += after([box.start + box.length for box in backs], net, begin, [("reduce", REDUCE)])

    row, net = pair("delayed")
    start, free = 0.0, 0.0
    for _ in range(2):
        work, _, end = compute(row, start)
        sent = after([end] * BUCKETS, net, max(free, end), WHOLE)
        boxes += work + sent
        free = sent[-1].start + sent[-1].length
        start = end

    row, net = pair("local")
    start = 0.0
    for _ in range(3):
        work, _, start = compute(row, start)
        boxes += work
    boxes.append(Box(net, start, 4.0, "weights", "W"))
    return svg(rows, boxes, "Two steps under each schedule", list(COLOURS))


def buckets() -> str:
    """One step: layers, gradients in the order in which they are ready, and the exchange of each bucket."""
    row, net = "this rank computes", "the network"
    work, ready, _ = compute(row, 0.0)
    sent = after(ready, net, 0.0, WHOLE)
    return svg([row, net], work + sent, "One step: compute and network", ["forward", "backward", "reduce", "gather"])


PICTURES = {"buckets.svg": buckets, "schedules.svg": schedules}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
