"""Makes the page of a run: one self-contained HTML file without scripts and without external resources."""

from pathlib import Path

from gradwire.core import write_whole
from gradwire.record import Run
from gradwire.report.html import Element, as_html, tag
from gradwire.report.sections import SECTIONS, made, section_facts, summary
from gradwire.report.steps import Predicted, predicted


def write_report(folder: Path, out: Path | None = None) -> str:
    """Write the page of a run, by default as report.html in the record's folder. Returns the summary and the page's path.

    Raises FormatError if the record cannot be read, WriteError if the page cannot be written.
    """
    run = Run.read(folder)
    run_folder = folder if folder.is_dir() else folder.parent
    path = out or run_folder / "report.html"
    write_whole(path, page(run, predicted(run, run_folder)), private=True)
    return f"{summary(run)}\nReport: {path}"


def page(run: Run, forecast: Predicted) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"gradwire: {run.model}"),
        tag("style", Path(__file__).with_name("style.css").read_text(encoding="utf-8")),
    )
    body = [
        tag("h1", f"gradwire: {run.model}"),
        tag("p", summary(run), class_="lead"),
        *(tag("p", tag("b", "Note: "), note) for note in run.notes),
        section_facts(run),
        *(_section(title, *part(run, forecast)) for title, part in SECTIONS.items()),
        _section("How this was measured", made(run)),
    ]
    return "<!DOCTYPE html>\n" + as_html(tag("html", head, tag("body", tag("main", *body)), lang="en")) + "\n"


def _section(title: str, *content: Element) -> Element:
    return tag("section", tag("h2", title), *content)
