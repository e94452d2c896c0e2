"""Makes the table of a run from its results."""

import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from gradwire.bench.results import BenchRun, Cell

NOTHING = "-"
COLUMNS = {
    "link": 9,
    "method": 14,
    "step ms": 7,
    "p10-p90": 11,
    "min": 5,
    "vs ddp": 17,
    "exposed": 7,
    "ideal": 5,
    "attain.": 7,
    "MB sent": 7,
    "/planned": 8,
    "CPU ms": 6,
    "scaling": 7,
    "S of S^max": 18,
    "loss": 5,
}
"""Each column and its usual width."""
LEFT_OUT_FIRST = ("S of S^max", "CPU ms", "min", "p10-p90", "/planned", "scaling", "attain.", "ideal", "exposed")
"""A narrow terminal leaves these columns out, in this order. The JSON has all of them."""
FULL_WIDTH = 190


def print_run(run: BenchRun, parts: Iterable[RenderableType] | None = None) -> int:
    """Print a run's tables, or `parts` instead, then notes and failures. Returns the exit status: 1 if a method failed."""
    console = Console() if sys.stdout.isatty() else Console(width=FULL_WIDTH)
    for part in tables(run, console.width) if parts is None else parts:
        console.print(part)
    for note in run.notes:
        print(f"Note: {note}")
    for failure in run.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


def tables(run: BenchRun, width: int = FULL_WIDTH) -> Iterator[Table]:
    """Yield one table per job. Times are milliseconds of a step, the mean over ranks; bytes are per rank and step."""
    names, left_out = list(COLUMNS), iter(LEFT_OUT_FIRST)
    while sum(COLUMNS[name] + 3 for name in names) >= width and (name := next(left_out, None)):
        names.remove(name)
    for job in dict.fromkeys(cell.job for cell in run.cells):
        table = Table(title=escape(_title(run, job)), title_justify="left")
        for name in names:
            justify: Literal["left", "right"] = "left" if name in ("link", "method") else "right"
            table.add_column(name, justify=justify, min_width=COLUMNS[name], overflow="fold")
        previous = None
        for cell in (cell for cell in run.cells if cell.job == job):
            if previous not in (None, cell.link):
                table.add_section()
            texts = _texts(cell)
            table.add_row(*[texts.get(name, NOTHING) for name in names])
            previous = cell.link
        yield table


def milliseconds(microseconds: float | None) -> str:
    """Write a time as milliseconds with about three digits.

    >>> milliseconds(12345.0), milliseconds(123456.0), milliseconds(None)
    ('12.3', '123', '-')
    """
    if microseconds is None:
        return NOTHING
    value = microseconds / 1e3
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def speedup_of_most(cell: Cell) -> str:
    """Write S, S^max and their ratio (DeAR, table II)."""
    if cell.speedup_alone is None or cell.max_speedup is None:
        return NOTHING
    share = cell.speedup_alone / cell.max_speedup
    return f"{cell.speedup_alone:.2f} of {cell.max_speedup:.2f}, {share:.0%}"


def _title(run: BenchRun, job: str) -> str:
    alone = next((a for a in run.alone if a.job == job and a.step is not None), None)
    size = f", {alone.parameters / 1e6:.2f}M parameters" if alone else ""
    by_itself = f", one rank alone {milliseconds(alone.step.mean_us)} ms" if alone and alone.step else ""
    return f"{job}{size}: {run.nodes} nodes x {run.ranks_per_node} ranks ({run.network}), {run.steps} steps{by_itself}"


def _texts(cell: Cell) -> dict[str, str]:
    """Return the text of each column. The message of a failed cell is printed below the table."""
    texts = {"link": escape(cell.link), "method": escape(cell.method)}
    if cell.failure is not None or cell.step is None:
        return texts | {"step ms": "FAILED"}
    step, ratio = cell.step, cell.speedup
    texts |= {
        "step ms": milliseconds(step.median_us),
        "p10-p90": f"{milliseconds(step.p10_us)}-{milliseconds(step.p90_us)}",
        "min": milliseconds(step.minimum_us),
        "vs ddp": f"{ratio.ratio:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else NOTHING,
        "exposed": milliseconds(cell.exposed_us),
        "ideal": milliseconds(cell.ideal_us),
        "attain.": milliseconds(cell.attainable_us),
        "CPU ms": milliseconds(cell.cpu_us),
        "S of S^max": speedup_of_most(cell),
        "loss": f"{cell.loss[-1]:.2f}" if cell.loss else NOTHING,
    }
    numbers = {
        "MB sent": None if cell.counted_bytes is None else cell.counted_bytes / 1e6,
        "/planned": cell.counted_over_planned,
        "scaling": cell.scaling_factor,
    }
    return texts | {name: f"{number:.2f}" for name, number in numbers.items() if number is not None}
