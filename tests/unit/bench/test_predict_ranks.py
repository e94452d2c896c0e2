"""Which rows a run of `predict_ranks` measures, and where it goes on."""

import pytest

from benchmarks.campaigns.predict_ranks import CELLS, errors_of, left_to_do
from gradwire.errors import FormatError


def rows(*keys: tuple[str, str, str]) -> list[dict[str, str]]:
    return [{"cell": cell, "job": job, "link": link} for cell, job, link in keys]


def test_a_run_goes_on_with_what_has_no_rows() -> None:
    everything = [(cell.name, job, link) for cell, job, link in left_to_do([], None, None, None)]
    assert len(everything) == len(set(everything)) == sum(len(cell.jobs) * len(cell.links) for cell in CELLS)
    done = everything[:5]
    assert [(cell.name, job, link) for cell, job, link in left_to_do(rows(*done), None, None, None)] == everything[5:]


def test_names_limit_what_is_measured() -> None:
    found = list(left_to_do([], ["4x1", "far-8x1"], ["transformer"], ["100mbit"]))
    assert [(cell.name, job, link) for cell, job, link in found] == [
        ("4x1", "transformer", "100mbit"),
        ("far-8x1", "transformer", "100mbit"),
    ]
    with pytest.raises(FormatError, match="there is no cell '5x1'"):
        list(left_to_do([], ["5x1"], None, None))


def test_errors_are_shares_of_what_was_measured() -> None:
    assert errors_of([{"error": None}]) == {"rows": 0}
    assert errors_of([{"error": -0.25}, {"error": 0.05}, {"error": 0.1}]) == {"rows": 3, "median": 0.1, "worst": 0.25}
