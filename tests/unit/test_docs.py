"""What the documentation names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "scripts.md"
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
NAMED = re.findall(r"(test_\w+\.py)::(\w+)(?:\[(.*?)\])?", PAGE.read_text())


@cache
def source(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


def defined(file: str) -> set[str]:
    """Names of the module's functions and classes."""
    return {node.name for node in source(file).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def words(file: str) -> set[str]:
    """All names and texts of a module: what the ids of its cases are made of."""
    nodes = list(ast.walk(source(file)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize(("file", "test", "case"), NAMED, ids=[f"{test}[{case}]" for _, test, case in NAMED])
def test_every_test_that_the_page_names_exists(file: str, test: str, case: str) -> None:
    assert file in FILES
    assert test in defined(file)
    if case:
        assert case.rpartition("-")[2] in words(file) | defined(file)


def test_every_row_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    without = [row for row in rows if "::" not in row and not row.startswith("| case |") and "see below" not in row]
    assert len(rows) > 80
    assert without == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page may end with."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_can_be_read_in_two_minutes() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    lossy = next(index for index, line in enumerate(lines) if "default is lossy" in line)
    assert lossy < 15
