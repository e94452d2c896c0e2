"""From a run's folder to its page."""

from pathlib import Path

from gradwire.core.files import write_whole
from gradwire.record.run import Run
from gradwire.report.page import page
from gradwire.report.predict import predicted
from gradwire.report.words import summary

__all__ = ["write_report"]


def write_report(folder: Path, out: Path | None = None) -> str:
    """Write the page of a run (None: report.html beside its record). Returns its first line and where the page is.

    Raises FormatError if there is no readable record, WriteError if the page cannot be written.
    """
    run = Run.read(folder)
    beside = folder if folder.is_dir() else folder.parent
    path = out or beside / "report.html"
    write_whole(path, page(run, predicted(run, beside)))
    return f"{summary(run)}\nReport: {path}"
