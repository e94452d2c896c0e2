"""Sweeps of `plan` and `simulate` over lists of rates and nodes: the options, the progress bar, the table, the picture."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.errors import FormatError

if TYPE_CHECKING:
    from gradwire.core import Cluster, Profile
    from gradwire.planner.sweep import SweepRow

Inter = Annotated[str | None, typer.Option(help="Sweep over rates between nodes in Gb/s, such as 1,10,25,100.")]
Nodes = Annotated[str | None, typer.Option(help="Sweep over numbers of nodes, such as 1,2,4,...,512 (... doubles).")]
Picture = Annotated[Path | None, typer.Option(help="With a sweep: PNG of the scaling factors. Needs matplotlib.")]


def points_of(cluster: "Cluster", inter: str | None, nodes: str | None, picture: Path | None) -> "list[Cluster]":
    """The clusters of a sweep, or none. Raises FormatError for unreadable lists, and for --picture without a sweep."""
    from gradwire.planner.ranges import read_nodes, read_rates
    from gradwire.planner.sweep import clusters
    from gradwire.report.pictures import check_picture

    if inter is None and nodes is None:
        if picture is not None:
            raise FormatError(
                f"--picture {picture} without a sweep: one cluster gives one point. Add --inter, such as 1,10,25,100, or "
                "--nodes, such as 1,2,4,...,64."
            )
        return []
    rates = None if inter is None else read_rates(inter)
    counts = None if nodes is None else read_nodes(nodes)
    if picture is not None:
        check_picture(picture, min(len(rates or (0,)), len(counts or (0,))))
    return clusters(cluster, rates, counts)


def refuse_with_sweep(**options: object) -> None:
    """Raises FormatError if an option is given that needs a single cluster."""
    for name, value in options.items():
        if value is not None:
            raise FormatError(
                f"--{name} {value} needs one cluster, not a sweep. Leave out --{name}, or --inter and --nodes."
            )


@contextmanager
def bar(what: str, steps: int) -> "Iterator[Callable[[int], None]]":
    """A progress bar on stderr, or one line if stderr is no terminal. Gives a function of the number of finished steps."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what}: {steps} steps", highlight=False)
        yield lambda done: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.update(task, completed=done)


def show_sweep(rows: "Sequence[SweepRow]", profile: "Profile", picture: Path | None, json: bool) -> None:
    """Print the table or the JSON, and draw the picture."""
    from gradwire.planner.sweep import as_json, as_table
    from gradwire.report.sweep import draw_sweep

    typer.echo((as_json if json else as_table)(rows, profile), nl=False)
    if picture is not None:
        draw_sweep(rows, profile.model, picture)
        typer.echo(f"Picture: {picture}", err=True)
