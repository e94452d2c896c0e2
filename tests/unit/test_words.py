"""Docstrings begin with a verb or with the noun they define, and prose has no private words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gradwire"

OPENER = re.compile(r"(?:Of|As|What|Those|These|The same|Whether what|For whoever|With|In|Without|From|To|By)\b")
PRIVATE = re.compile(
    r"\btold\b|\bhears?\b|\bheard\b|\blands\b|\bowe[ds]?\b|\bvoices?\b|\btakes? over\b|\btook over\b|\bbeside\b",
    re.IGNORECASE,
)
NAMES = re.compile(r"`[^`]*`")


def package_of(path: Path) -> str:
    """The first folder under gradwire, or the module's own name; kernels/reference is a package of its own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:2]) if parts[:2] == ("kernels", "reference") else parts[0]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each string that stands as a statement: docstrings, also of attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings_in(source: str) -> Iterator[tuple[int, str]]:
    """The line and the words of each finding in a module's source; names in backticks do not count."""
    prose = list(docstrings(source))
    for line, text in prose:
        if opener := OPENER.match(text.strip()):
            yield line, f"begins with {opener.group()!r}"
    for line, text in [*prose, *comments(source)]:
        for word in PRIVATE.findall(NAMES.sub("", text)):
            yield line, f"has {word!r}"


@cache
def findings() -> dict[str, list[str]]:
    """The findings of every package, as `path:line begins with 'Of'`."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = found.setdefault(package_of(path), [])
        lines += [f"{path.relative_to(PACKAGE)}:{line} {what}" for line, what in findings_in(path.read_text())]
    return found


@pytest.mark.parametrize("package", sorted({package_of(path) for path in PACKAGE.rglob("*.py")}))
def test_prose_of_package(package):
    assert not findings()[package], "\n".join(["reword:", *findings()[package]])


SAMPLE = '''
"""With a fragment."""
limit = 3
"""Of the queue."""


class Queue:
    """The queue of a lane; `told` is a name."""

    def put(self, item):
        """Put an item beside the others."""
        self.items.append(item)  # nobody is told
        return f"told {item}"
'''


def test_findings_are_found():
    assert sorted(findings_in(SAMPLE)) == [
        (2, "begins with 'With'"),
        (4, "begins with 'Of'"),
        (11, "has 'beside'"),
        (12, "has 'told'"),
    ]
