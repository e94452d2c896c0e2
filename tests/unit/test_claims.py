"""The table of the papers' claims (docs/papers/index.md): every figure and table, a verdict, and a command that exists."""

import re
from pathlib import Path

import pytest
import typer

import benchmarks.__main__
from gradwire.cli import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers" / "index.md"
VERDICTS = ("reproduced", "in part", "contradicted", "not here", "drawing")
PAPERS = {"Cupcake": (9, 1), "ByteComp": (15, 6), "CGX": (11, 8), "DeAR": (11, 2), "CD-SGD": (10, 2)}
"""The numbers of figures and of tables in each paper."""
ROMAN = {"I": 1, "II": 2}


def rows_of(paper: str) -> list[list[str]]:
    """The cells of each row of the paper's table."""
    section = PAGE.read_text().split(f"\n### {paper}\n")[1].split("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| ---")]


def named(rows: list[list[str]], word: str) -> set[int]:
    """The numbers of the figures, or tables, that the rows are about: of "Figures 1, 3 and 5 to 7" 1, 3, 5, 6 and 7."""
    found: set[int] = set()
    for what, *_ in rows:
        for listed in re.findall(rf"{word}s? ((?:\d+|I+)[a-z]?(?:(?:, | and | to )(?:\d+|I+)[a-z]?)*)", what):
            numbers = [ROMAN.get(each) or int(each) for each in re.findall(r"\d+|I+", listed)]
            found.update(numbers)
            for first, last in re.findall(r"(\d+) to (\d+)", listed):
                found.update(range(int(first), int(last) + 1))
    return found


def test_lists_of_figures_are_read() -> None:
    rows = [["Figures 1, 3 and 5 to 7, Listing 1"], ["Table 2, Figure 9a: bytes"], ["Table II"]]
    assert named(rows, "Figure") == {1, 3, 5, 6, 7, 9} and named(rows, "Table") == {2}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_and_table_has_a_row(paper: str) -> None:
    figures, tables = PAPERS[paper]
    rows = rows_of(paper)
    assert named(rows, "Figure") == {*range(1, figures + 1)}
    assert named(rows, "Table") == {*range(1, tables + 1)}
    assert len({what for what, *_ in rows}) == len(rows)
    assert sum("Abstract" in what for what, *_ in rows) >= 1 or paper == "CGX"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_has_a_verdict_and_a_command_that_exists(paper: str) -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for what, claimed, found, verdict, command in rows_of(paper):
        assert all((what, claimed, found)), what
        assert verdict in VERDICTS, what
        words = command.strip("`").split()
        if words[:3] == ["python", "-m", "benchmarks"]:
            assert words[3] in benchmarks.__main__.PARTS, command
        elif words[:3] == ["python", "-m", "pytest"]:
            assert (ROOT / words[3]).exists(), command
        else:
            assert words[0] == "gradwire" and words[1] in commands, command
        if verdict in ("reproduced", "contradicted") and what.startswith(("Figure", "Table", "Abstract")):
            assert re.search(r"\d", found), f"{what}: no number"
