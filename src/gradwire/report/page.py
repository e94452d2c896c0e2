"""The page of a run: one self-contained HTML file, without scripts, without anything from elsewhere."""

from gradwire.record.run import Run
from gradwire.report.html import Element, as_html, tag
from gradwire.report.predict import Predicted
from gradwire.report.sections import SECTIONS, made, section_facts
from gradwire.report.style import STYLE
from gradwire.report.words import summary

__all__ = ["page"]


def page(run: Run, predicted: Predicted) -> str:
    """The file's text. `predicted` is `gradwire.report.predict.predicted` of the run and its folder."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"gradwire: {run.model}"),
        tag("style", STYLE),
    )
    body = [
        tag("h1", f"gradwire: {run.model}"),
        tag("p", summary(run), class_="lead"),
        *(tag("p", tag("b", "Note: "), note) for note in run.notes),
        section_facts(run),
        *(_section(title, *part(run, predicted)) for title, part in SECTIONS.items()),
        _section("How this was measured", made(run)),
    ]
    return "<!DOCTYPE html>\n" + as_html(tag("html", head, tag("body", tag("main", *body)), lang="en")) + "\n"


def _section(title: str, *content: Element) -> Element:
    return tag("section", tag("h2", title), *content)
