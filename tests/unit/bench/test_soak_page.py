"""The figures of docs/reliability.md are those of the soak's summary."""

from typing import Any

from benchmarks.soak_page import NOT_YET, soak_figures

SUMMARY: dict[str, Any] = {
    "command": "make soak", "date": "2026-01-02", "machine": "2 cores", "seconds": 1800, "group_timeout_s": 5.0,
    "faults": 43, "passed_faults": 42, "compared": 40, "not_comparable": {"auto decided again": 3},
    "pairs": {"killed": {"backward": [21, 21], "ddp hook": [2, 2]}, "uneven": {"backward": [20, 19]}},
    "kinds": {"killed": {"trials": 23, "passed": 23, "error_after_s": {"median": 0.5, "max": 1.25}},
              "uneven": {"trials": 20, "passed": 19}},
    "endurance": [{"ranks": 2, "steps": 1000, "drift_checks": 10, "memory_growth_bytes": -250_000}],
}  # fmt: skip


def test_figures_are_those_of_the_summary() -> None:
    lines = soak_figures(SUMMARY).splitlines()
    assert "`make soak`, 2026-01-02, 2 cores; 1800 s. The group's timeout was 5 s." in lines
    for row in (
        "| faults, and how many trials passed | 43, 42 |",
        "| fewest trials of a pair of a kind and a schedule | 20 |",
        "| not compared: auto decided again | 3 |",
        "| killed: the last survivor's error, after the fault | 0.5 s in the median, 1.25 s at most |",
        "| growth of resident memory in these steps | -0.25 MB |",
        "| fault | backward | ddp hook |",
        "| killed | 21 | 2 |",
        "| uneven | 20 | - |",
    ):
        assert row in lines, row


def test_without_a_summary_of_pairs_nothing_is_claimed() -> None:
    assert soak_figures({}) == soak_figures({"faults": {"killed": {"trials": 200}}}) == NOT_YET
