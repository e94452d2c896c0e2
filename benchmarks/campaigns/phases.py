"""Measures how long a step waits for each phase: DeAR's Fig. 8, for uncompressed gradients and for 4 bits.

The reduce phase alone, and the gather phase alone, run with the same compute. The step's time beyond compute is the
exposed time of that phase. Runs that leave a phase out are wrong on purpose, and only their times are used. Both
schedules send by all-to-all and all-gather, so that they differ only in the moments of sending.
"""

from collections.abc import Iterator

from rich.table import Table

from benchmarks.campaigns.measuring import measure
from benchmarks.campaigns.parts import WRONG_PREFIX
from gradwire.bench.names import GRADWIRE_PREFIX
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.table import NOTHING, milliseconds, speedup_of_most

__all__ = ["phases_methods", "phases_tables", "run"]

SPECS = {"float32": '{"id":"identity"}', "4 bits": '{"id":"qsgd","bits":4}'}
SCHEDULES = ("backward", "pipelined")


def run(arguments: list[str]) -> int:
    """Measure, and print the tables."""
    return measure("phases", arguments, phases_methods(), phases_tables)


def phases_methods() -> list[str]:
    """The methods of the bench that `phases_tables` needs."""
    ways = [_policy(spec, schedule) for spec in SPECS for schedule in SCHEDULES]
    return ["floor", "ddp", *(method for way in ways for method in (_whole(way), _only("reduce", way), _only("gather", way)))]


def phases_tables(run: BenchRun) -> Iterator[tuple[Table, str]]:
    """Yield the table of each job and link, and a note for its reader."""
    for job, link in dict.fromkeys((cell.job, cell.link) for cell in run.cells):
        cells = {cell.method: cell for cell in run.cells if (cell.job, cell.link) == (job, link)}
        table = Table(title=f"{job}, {link}, {run.nodes} nodes x {run.ranks_per_node} ranks", title_justify="left")
        for column in (
            "gradients",
            "schedule",
            "exposed reduce*",
            "exposed gather*",
            "exposed",
            "step ms",
            "vs ddp",
            "S of S^max",
        ):
            table.add_column(column, justify="left" if column in ("gradients", "schedule") else "right")
        table.add_row("float32", "plain DDP", NOTHING, NOTHING, *_of_whole(cells["ddp"]))
        for spec in SPECS:
            for schedule in SCHEDULES:
                way = _policy(spec, schedule)
                alone = (milliseconds(cells[_only(phase, way)].exposed_us) for phase in ("reduce", "gather"))
                table.add_row(spec, schedule, *alone, *_of_whole(cells[_whole(way)]))
        yield table, _in_words(cells["floor"])


def _of_whole(cell: Cell) -> tuple[str, ...]:
    step_us = cell.step.median_us if cell.step else None
    faster = NOTHING if cell.speedup is None else f"{cell.speedup.ratio:.2f}x"
    return milliseconds(cell.exposed_us), milliseconds(step_us), faster, speedup_of_most(cell)


def _in_words(floor: Cell) -> str:
    if floor.step is None or floor.forward_us is None or floor.backward_us is None:
        return "Compute failed; see below."
    update_us = floor.step.median_us - floor.forward_us - floor.backward_us
    return (
        f"Compute alone: forward {milliseconds(floor.forward_us)} ms, backward {milliseconds(floor.backward_us)} ms, the "
        f"optimizer's step {milliseconds(update_us)} ms. Exposed: milliseconds that a step takes more.\n"
        "* WRONG ON PURPOSE: steps without the other phase, for their time alone; what they train is no result."
    )


def _policy(spec: str, schedule: str) -> str:
    return f'{{"default":{SPECS[spec]},"scheme":"alltoall"}}@{schedule}'


def _whole(policy: str) -> str:
    return f"{GRADWIRE_PREFIX}{policy}"


def _only(phase: str, policy: str) -> str:
    return f"{WRONG_PREFIX}{phase}-only:{policy}"
