"""The live view of a run: one progress bar per method."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradwire.bench.results import StepEvent


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
            self.console.print(f"{title}: {len(methods)} methods, {steps} steps each", highlight=False)
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
            self._title = self._progress.add_task(f"[bold]{title}", total=None, now="starting the ranks", start=False)
            self._tasks = {
                name: self._progress.add_task(f"  {name}", total=steps, now="", start=False) for name in methods
            }
            try:
                yield
            finally:
                self._tasks = {}
                self._progress = None

    def step(self, event: StepEvent) -> None:
        """Advance the bar of the event's method."""
        if self._progress is None or event.method not in self._tasks:
            return
        task = self._tasks[event.method]
        if event.step == 0:
            self._progress.update(self._title, now="")
            self._progress.start_task(task)
        now = f"{event.us / 1e3:.0f} ms a step, loss {event.loss:.2f}"
        self._progress.update(task, completed=event.step + 1, now=now)
