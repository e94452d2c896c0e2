"""Which cases of a test with many `make test` and `make test-ci` run."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from sampling import sample

PHASES = ("forward", "backward", "step")
RANKS = (0, 1, 2)


@dataclass(eq=False)
class Case:
    """What the sampling reads of a test."""

    name: str
    callspec: SimpleNamespace


CASES: list[Any] = [
    Case(f"test[{phase}-{rank}]", SimpleNamespace(params={"phase": phase, "rank": rank})) for phase in PHASES for rank in RANKS
]


def values(cases: set[Any], parameter: str) -> list[Any]:
    return sorted(case.callspec.params[parameter] for case in cases)


def test_every_case_of_a_sample_adds_as_many_values_as_one_can() -> None:
    two = sample(CASES, 2)
    assert len(set(values(two, "phase"))) == len(set(values(two, "rank"))) == 2
    three = sample(CASES, 3)
    assert values(three, "phase") == sorted(PHASES)
    assert values(three, "rank") == [*RANKS]


def test_a_sample_ends_with_the_last_value_and_is_the_same_in_every_run() -> None:
    assert len(sample(CASES, 9)) == 3
    assert sample(CASES, 2) == sample(CASES[::-1], 2)
    assert sample(CASES, 2) < sample(CASES, 3)


@pytest.mark.parametrize(
    ("folder", "marks", "of_make_test", "of_ci"),
    [
        ("ranks", (), True, True),
        ("ranks", ("slow",), False, True),
        ("kernels", ("slow",), False, True),
        ("scripts", ("slow",), False, False),
        ("ranks", ("slow", "thorough"), False, False),
        ("ranks", ("slow", "timing"), False, False),
        ("ranks", ("whole",), False, False),
    ],
)
def test_ci_leaves_out_slow_cases_where_each_takes_long(
    monkeypatch: pytest.MonkeyPatch, folder: str, marks: tuple[str, ...], of_make_test: bool, of_ci: bool
) -> None:
    case: Any = SimpleNamespace(path=Path(folder, "a.py"), iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks])
    for is_ci, expected in ((False, of_make_test), (True, of_ci)):
        monkeypatch.setattr(conftest, "_IS_CI", is_ci)
        assert conftest.is_sampled(case) is expected
