"""The tables of the matrix, for the terminal and its page. Pure: no torch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from benchmarks.campaigns.matrix_cells import AGGRESSIVE, EXACT, METHODS, POWERSGD, SAFE, WINDOW, MatrixCell, Reached
from benchmarks.campaigns.matrix_checks import verdict_lines
from benchmarks.campaigns.matrix_first import COLUMNS, FIRST_STEP, JUDGED_STEPS
from gradwire.record.run import Interval

__all__ = ["matrix_page", "terminal_tables"]

NAMES = {
    "ddp": "DDP",
    "ddp-again": "DDP again",
    "ddp-2mb": "DDP, 2 MB",
    "ddp-fp16": "fp16 hook",
    POWERSGD: "PowerSGD hook",
    EXACT: "auto exact",
    SAFE: "auto safe",
    AGGRESSIVE: "auto aggressive",
}
"""Names of the methods that train until they have DDP's loss."""
FIXED_NAMES = {"gradwire:qsgd4": "4 bits", "gradwire:qsgd2-ef": "2 bits, feedback"}
"""Names of the methods of which only steps are measured."""

HEAD = """# Auto beside DDP: every job, link and number of nodes

Measured by `python -m benchmarks matrix --measure`, written by `python -m benchmarks matrix`; do not edit. Measured {made} with
torch {torch} on a machine of {cores} cores, on emulated nodes of one rank each. **All ranks share these cores**: on 4 nodes
compute takes about twice as long as on 2, and codecs compete with it.

All methods of a cell took turns in one run. Numbers but the first are times faster than DDP with torch's own buckets: the
median over {pairs} pairs of turns of one round, with its 95 % bootstrap interval. *DDP again* is DDP a second time: what it
differs from 1 is chance. *Over the better DDP* compares with DDP's own or 2 MB buckets, whichever was faster in rounds that are
not compared. *Attainable* is max(compute + codec, wire). Only steps after auto had decided count here.

*Seconds to DDP's loss* count every step from the first, with all that auto measured and tried: until the mean loss of {window}
steps is that of DDP's last {window} of {steps} steps. ~ : some steps were not made over this link but count with the mean step,
where the losses are DDP's own. > : not reached in what was run; over links faster than 500 Mb/s nothing is run for it beyond
the turns. *Held-out* is the loss, at as many steps, on batches that nobody trains on: of the digits, other draws of the same
images. It is one evaluation of one run, and of the resnet it is noisy: DDP's own value goes from 0.322 at step 112 to 0.404 at
step 120 (2 nodes, 1000 Mb/s). [Accuracy](measured.md#accuracy) compares several seeds.

*Behind* is the time of auto's first n steps, with all that auto measured and tried, over the time of n median steps of the
better DDP, at n = {first} and at the worst n from {first} to {judged}. *Over the best* is the median step of auto's choice over
that of the fastest of DDP and all that auto chooses from. *Safe, of attainable* is the step over the attainable one: 1 is best.
*Decided in* and *seconds* are steps and time until the first decision, and the most that they may be (15 steps; 2 s or five
steps of DDP, whichever is longer). *Steps over DDP's* is the better DDP's median step over auto's after its decision. *Runs* is
the plan that was chosen. In the cells of 4 nodes each process had trained another model for two steps before any turn, so that
loading the data counts for no method.

The cells of the transformer were measured on 2026-11-30, after release 0.3. The others are of gradwire 0.2, whose 2 bits were
others than [those of today](auto.md#safe-by-the-number-of-ranks). *2 bits, feedback* are those of 0.2, which "safe" has no more:
they lose more, and send a fifth less. That is why the transformer's choice over 100 Mb/s takes 1.2 times as long as they do. The
cells of mlp and resnet on 4 nodes at 1000 Mb/s, and of the resnet there without a limit, are of an AMD EPYC; the others of an
Intel Xeon. Compare inside a cell.

"""


class Sheet(NamedTuple):
    """A table before anybody has drawn it. The first two columns are names."""

    title: str
    header: list[str]
    rows: list[list[str]]


def terminal_tables(cells: Sequence[MatrixCell]) -> Iterator[Table]:
    """All sheets."""
    for sheet in _sheets(cells):
        table = Table(title=sheet.title, title_justify="left")
        for at, name in enumerate(sheet.header):
            table.add_column(name, justify="left" if at < 2 else "right", overflow="fold")
        for row in sheet.rows:
            table.add_row(*row)
        yield table


def matrix_page(cells: Sequence[MatrixCell]) -> str:
    """docs/matrix.md."""
    run = cells[0].run
    head = HEAD.format(
        made=run.made.date[:10],
        torch=run.torch,
        cores=run.cores,
        pairs=min(cell.pairs for cell in cells),
        steps=len(cells[0].learning.cells[-1].loss),
        window=WINDOW,
        first=FIRST_STEP,
        judged=JUDGED_STEPS,
    )
    parts = [f"## {sheet.title}\n\n{_markdown(sheet)}\n" for sheet in _sheets(cells)]
    lines = "\n".join(f"- {line.strip()}" for line in verdict_lines(cells))
    return head + "\n".join(parts) + f"\n## What was asked of it\n\n{lines}\n"


def _sheets(cells: Sequence[MatrixCell]) -> Iterator[Sheet]:
    for nodes in dict.fromkeys(cell.run.nodes for cell in cells):
        chosen = [cell for cell in cells if cell.run.nodes == nodes]
        yield _steps(f"{nodes} nodes: steps", chosen)
        yield _losses(f"{nodes} nodes: seconds to DDP's loss", chosen)
        rows = [[cell.job, cell.link, *cell.first_steps.row] for cell in chosen]
        yield Sheet(f"{nodes} nodes: auto from its first step", ["job", "link", *COLUMNS], rows)


def _steps(title: str, cells: Sequence[MatrixCell]) -> Sheet:
    compared = [name for name in METHODS if name not in ("floor", "ddp")]
    names = NAMES | FIXED_NAMES
    compared.sort(key=list(names).index)
    header = ["job", "link", "DDP, ms", *(names[name] for name in compared)]
    header += ["safe over the better DDP", "safe, of attainable", "safe chose"]
    rows = []
    for cell in cells:
        row = [cell.job, cell.link, f"{cell.median_ms('ddp'):.0f}"]
        row += [_times(cell.speedup(name)) for name in compared]
        part = cell.of_attainable(SAFE)
        row += [_times(cell.speedup(SAFE, cell.better_ddp)), "-" if part is None else f"{part:.2f}"]
        rows.append([*row, cell.chose(SAFE) or "-"])
    return Sheet(title, header, rows)


def _losses(title: str, cells: Sequence[MatrixCell]) -> Sheet:
    learners = ("ddp", POWERSGD, SAFE, AGGRESSIVE)
    header = ["job", "link", "DDP's loss", *NAMES.values(), *(f"held-out, {NAMES[name]}" for name in learners)]
    rows = []
    for cell in cells:
        row = [cell.job, cell.link, f"{cell.target:.3g}", *(_seconds(cell.reached(name)) for name in NAMES)]
        held_out = [cell.held_out(name) for name in learners]
        rows.append([*row, *("-" if loss is None else f"{loss:.3g}" for loss in held_out)])
    return Sheet(title, header, rows)


def _times(interval: Interval) -> str:
    return f"{interval.ratio:.2f} ({interval.low:.2f}-{interval.high:.2f})"


def _seconds(reached: Reached) -> str:
    """Write seconds, with at least a tenth of a second.

    >>> _seconds(Reached(12.34, 100)), _seconds(Reached(12.34, 100, computed=True)), _seconds(Reached(9.0, None))
    ('12.3', '~12.3', '> 9.0')
    """
    sign = "> " if reached.step is None else "~" if reached.computed else ""
    return f"{sign}{reached.seconds:.1f}"


def _markdown(sheet: Sheet) -> str:
    lines = ["| " + " | ".join(sheet.header) + " |"]
    lines.append("|---|---|" + "---:|" * (len(sheet.header) - 2))
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in sheet.rows)])
