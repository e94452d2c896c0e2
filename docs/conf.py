"""How Sphinx makes the documentation: `make docs` writes it to build/docs."""

import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gradwire import Spec, __version__  # noqa: E402
from gradwire.cli import app as gradwire_commands  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "gradwire"
author = "the gradwire authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx_copybutton"]
suppress_warnings = ["epub.unknown_project_files"]
highlight_language = "text"
smartquotes = False  # quotes are code more often than not
html_theme = "furo"
html_title = f"gradwire {__version__}"
html_static_path: list[str] = []
html_copy_source = False

myst_heading_anchors = 4
myst_links_external_new_tab = False

# docstrings are plain text: see plain_docstring
default_role = "literal"
autodoc_member_order = "bysource"
# what every spec or document has is shown once, where it is defined
OF_ALL = sorted(name for name in vars(Spec) if not name.startswith("_"))
autodoc_default_options = {
    "members": True,
    "exclude-members": ",".join([*OF_ALL, "what", "remedy", "omit_at_default"]),
}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# a framework that is not installed is replaced, so that the page of its integration can still be made
autodoc_mock_imports = [name for name in ("torch", "transformers", "accelerate", "lightning") if find_spec(name) is None]

linkcheck_timeout = 20
linkcheck_retries = 2

COMMANDS, UNTIL = "<!-- commands -->", "<!-- until here -->"
"""Where reference/cli.md gets the options of every command, in place of what it says there."""


def plain(text: str) -> str:
    """A line of a docstring as reStructuredText that shows the same characters: code in backticks, no other markup."""
    parts = re.split(r"(`[^`]+`)", text)
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = f"`{part}`"
        else:
            parts[at] = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
    return "".join(parts)


def parameters_of(about: Any) -> set[str]:
    """The names of the parameters of a function or class; none where they cannot be told."""
    try:
        return set(inspect.signature(about).parameters)
    except (TypeError, ValueError):
        return set()


def plain_docstring(app: "Sphinx", what: str, name: str, about: Any, options: object, lines: list[str]) -> None:
    """Keeps paragraphs, lists, examples after `::` and `>>>`; all else is text. Lines `parameter: text` become a list."""
    parameters = parameters_of(about)
    made: list[str] = []
    example = False
    inside = ""
    """What stands before the lines of the present item of a list."""
    for line in lines:
        example = (example and bool(line.strip())) or line.lstrip().startswith(">>>")
        if example or line.startswith("    "):
            made.append(line)
            continue
        given = re.match(r"(\w+(?:(?:, | and )\w+)*): (.*)", line)
        if given is not None and set(re.split(", | and ", given[1])) <= parameters:
            if not inside and made and made[-1]:
                made.append("")
            made.append(f"- ``{given[1]}``: {plain(given[2])}")
            inside = "  "
        elif not line.strip():
            made.append("")
            inside = ""
        elif re.match(r"- |\d\. ", line):
            if made and made[-1] and not re.match(r"- |\d\. |  ", made[-1]):
                made.append("")
            made.append(plain(line))
        else:
            made.append(inside + plain(line))
    lines[:] = made


def options_of(command: Any, context: typer.Context) -> str:
    """The arguments and options of one command, as rows of a table."""
    rows = [param.get_help_record(context) for param in command.get_params(context)]
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows if row is not None]
    return "\n".join(["| option | meaning |", "|---|---|", *(f"| `{name}` | {words} |" for name, words in cells)])


def command_line() -> str:
    """Every command of `gradwire`: what it does, how it is called, its options."""
    group: Any = typer.main.get_command(gradwire_commands)
    parent = typer.Context(group, info_name="gradwire")
    parts = []
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        context = typer.Context(command, info_name=name, parent=parent)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        words = re.sub(r"(?<!\S)(--?\w[\w-]*)", r"`\1`", command.help or "")
        parts.append(f"## gradwire {name}\n\n{words}\n\n```\n{usage}\n```\n\n{options_of(command, context)}\n")
    return "\n".join(parts)


def fill_in(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Writes the commands into the page of the command line."""
    if COMMANDS in source[0]:
        before, _, rest = source[0].partition(COMMANDS)
        source[0] = before + command_line() + rest.partition(UNTIL)[2]


def setup(app: "Sphinx") -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("source-read", fill_in)
