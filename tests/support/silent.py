"""A progress view that shows nothing."""

from rich.console import Console

from gradwire.bench.progress import ProgressView


def silent() -> ProgressView:
    return ProgressView(Console(quiet=True))
