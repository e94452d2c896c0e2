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


OUTSIDE = re.compile(
    r"\b[Nn]otes (?:D[0-9]|[0-9]+\.[0-9])|\bD[0-9]{1,2}\b|\b(?:notes|architecture|field|style)\.md\b"
    r"|\b[Tt]he (?:design|review|brief|blueprint|notes')(?!\w)|\bdesign,? section\b"
)
"""References to texts that are not in the repository."""


def written() -> list[Path]:
    """All code and prose of the repository."""
    folders = ("src", "csrc", "tests", "docs", "benchmarks", "examples")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    found = [path for path in found if path.suffix in {".py", ".cpp", ".hpp", ".md"}]
    return found + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md")]


def test_no_text_refers_to_what_is_not_in_the_repository() -> None:
    wrong = []
    for path in written():
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        wrong += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if OUTSIDE.search(line)]
    assert wrong == []


def test_the_rule_sees_what_it_is_for() -> None:
    bad = [
        "notes " + "D" + "12",
        "(section 3; D" + "21)",
        "as notes " + "2.2 say",
        "see architecture" + ".md",
        "the " + "review",
    ]
    assert [text for text in bad if not OUTSIDE.search(text)] == []
    good = ["decision 12", "each notes begin and end", "0xD3", "notes: list[str]", "Cupcake, section 4.1", "| D | 2 |"]
    assert [text for text in good if OUTSIDE.search(text)] == []


def test_every_page_that_is_named_in_a_comment_exists() -> None:
    for path in written():
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))


@cache
def words_of_the_code() -> set[str]:
    return {word for path in written() if path.suffix == ".py" for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_what_the_page_of_a_paper_names_exists(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"`((?:src|csrc|tests|docs|benchmarks|examples)/[^`]*)`", text)
    assert page.stem == "index" or ("## Where in the code" in text and len(files) > 3)
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in re.findall(r"`(\w+_\w+)`", text) if name not in words_of_the_code()] == []


def test_the_glossary_is_in_alphabetical_order() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    entries = [line for line in lines if line.startswith("- ")]
    names = [re.match(r"- \*\*([^*]+)\*\*: \S", line) for line in entries]
    assert [entry for entry, name in zip(entries, names, strict=True) if name is None] == []
    found = [name[1].lower() for name in names if name is not None]
    assert len(set(found)) == len(found) > 40
    assert found == sorted(found)


def test_the_readme_can_be_read_in_two_minutes() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    lossy = next(index for index, line in enumerate(lines) if "default is lossy" in line)
    assert lossy < 15
