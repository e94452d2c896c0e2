"""Shows a run while it goes on: one progress bar per method, or a table of a race."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire.bench.results import StepEvent


class View(Protocol):
    """The interface of live views. The runner reports each cell group and each step."""

    def group(self, title: str, methods: Sequence[str], steps: int) -> AbstractContextManager[None]:
        """Show a cell group until the context ends."""

    def step(self, event: StepEvent) -> None:
        """Show that rank 0 made a step or an evaluation."""


class ProgressView:
    """Bars on a terminal. On any other console, one line at the start of each group."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @contextmanager
    def group(self, title: str, methods: Sequence[str], steps: int) -> Iterator[None]:
        """Show a bar for each method until the context ends."""
        if not self.console.is_terminal:
            self.console.print(f"{title}: {len(methods)} methods, {steps} steps each", highlight=False, markup=False)
            yield
            return
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]:<28}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._title = self._progress.add_task(f"[bold]{escape(title)}", total=None, now="starting the ranks", start=False)
            self._tasks = {
                name: self._progress.add_task(f"  {escape(name)}", total=steps, now="", start=False) for name in methods
            }
            try:
                yield
            finally:
                self._tasks = {}
                self._progress = None

    def step(self, event: StepEvent) -> None:
        """Advance the bar of the event's method."""
        if self._progress is None or event.method not in self._tasks or event.held_out is not None:
            return
        task = self._tasks[event.method]
        if event.step == 0:
            self._progress.update(self._title, now="")
            self._progress.start_task(task)
        now = f"{event.us / 1e3:.0f} ms a step, loss {event.loss:.2f}"
        self._progress.update(task, completed=event.step + 1, now=now)


class RaceView:
    """A live table of methods that train for equal seconds. On a console that is no terminal, one line for each evaluation."""

    def __init__(self, console: Console, samples_per_step: int) -> None:
        self.console = console
        self._samples = samples_per_step
        self._rows: dict[str, tuple[int, float, float | None]] = {}
        """Number of steps, seconds of training, and the last held-out loss, by method."""
        self._live: Live | None = None

    @contextmanager
    def group(self, title: str, methods: Sequence[str], steps: int) -> Iterator[None]:
        """Show the table until the context ends."""
        self._rows = {name: (0, 0.0, None) for name in methods if name != "floor"}
        self._title = title
        self.console.print(f"{title} ...", highlight=False, markup=False)
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def step(self, event: StepEvent) -> None:
        """Count a step, or show an evaluation."""
        if event.method not in self._rows:
            return
        steps, seconds, loss = self._rows[event.method]
        if event.held_out is None:
            self._rows[event.method] = event.step + 1, seconds + event.us / 1e6, loss
        else:
            self._rows[event.method] = steps, seconds, event.held_out
            if self._live is None:
                words = f"  {event.method:<14} {seconds:5.1f} s  {steps:5} steps  {steps * self._samples:6} samples"
                self.console.print(f"{words}  held-out loss {event.held_out:.3f}", highlight=False, markup=False)
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table(title=escape(self._title), title_justify="left")
        for name in ("", "seconds", "steps", "samples", "held-out loss"):
            table.add_column(name, justify="right" if name else "left")
        for name, (steps, seconds, loss) in self._rows.items():
            samples = str(steps * self._samples)
            table.add_row(escape(name), f"{seconds:.1f}", str(steps), samples, "-" if loss is None else f"{loss:.3f}")
        return table
