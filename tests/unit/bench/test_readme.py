"""The README's table: it is that of the committed results, and its rows are read as they are meant."""

from pathlib import Path

import pytest

from benchmarks import readme

TEXT = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_readme_has_the_table_of_the_committed_results() -> None:
    assert readme.in_readme(TEXT, readme.networks()) == TEXT


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no mark .<!-- networks"):
        readme.in_readme("no marks", "block")


def test_a_method_that_was_not_measured_has_a_dash() -> None:
    auto = {"step_ms": 100.0, "decided": [{"chosen": "uncompressed in 9 buckets"}]}
    assert readme.row_of("4 machines", "no limit", {"DDP": {"step_ms": 120.0}, "auto": auto}) == [
        *("4 machines", "no limit", "120 ms", "-", "-"),
        "1.2x (uncompressed)",
    ]


def test_the_row_of_gpus_says_that_it_is_predicted() -> None:
    row = readme.gpu_row({"ddp_ms": 180.0, "exact_ms": 150.0, "ms": 90.0})
    assert "predicted" in row[0] and row[2:] == ["180 ms", "1.2x", "-", "2.0x (EF-SignSGD)"]
