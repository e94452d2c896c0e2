"""Which cases of a test with many `make test` and `make test-ci` run."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from sampling import sample
from turns import COSTLY, TURNS, costly_of, of_test, turns

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


# ---- costly tests run in turns


def test_turns_take_equally_long_and_every_costly_test_has_one() -> None:
    lines = [line.split() for line in COSTLY.read_text(encoding="utf-8").splitlines()]
    found = turns(COSTLY.read_text(encoding="utf-8"))
    sums = [sum(float(seconds) for seconds, name in lines if found[name] == turn) for turn in range(TURNS)]
    assert len(found) == len(lines) and max(sums) - min(sums) <= max(float(seconds) for seconds, _ in lines)


@pytest.mark.parametrize("name", [line.split()[1] for line in COSTLY.read_text(encoding="utf-8").splitlines()])
def test_costly_tests_exist(name: str) -> None:
    file, _, function = name.partition("::")
    text = (COSTLY.parents[1] / file).read_text(encoding="utf-8")
    assert not function or f"def {function.rpartition('::')[2]}(" in text


def test_cases_of_a_test_and_tests_of_a_file_run_in_one_turn() -> None:
    found = turns("9 tests/a.py::test_one\n5 tests/b.py\n")
    assert of_test("tests/a.py::test_one[x-1]", found) == of_test("tests/a.py::test_one[y]", found) == 0
    assert of_test("tests/b.py::test_any", found) == 1
    assert of_test("tests/a.py::test_two", found) is None


def test_costly_tests_are_taken_from_a_report() -> None:
    report = (
        '<testsuites><testsuite><testcase classname="tests.ranks.test_a" name="test_one[1]" time="3"/>'
        '<testcase classname="tests.ranks.test_a" name="test_one[2]" time="4"/>'
        '<testcase classname="tests.unit.sim.test_b.TestLaws" name="test_two" time="6"/>'
        '<testcase classname="tests.scripts.test_bench_demo" name="test_three" time="40"/>'
        '<testcase classname="tests.ranks.test_a" name="test_quick" time="1"/></testsuite></testsuites>'
    )
    assert costly_of(report).splitlines() == [
        "40 tests/scripts/test_bench_demo.py",
        "7 tests/ranks/test_a.py::test_one",
        "6 tests/unit/sim/test_b.py::TestLaws::test_two",
    ]


def test_costly_tests_that_a_report_does_not_have_stay() -> None:
    report = '<testsuite><testcase classname="tests.ranks.test_a" name="test_one" time="7"/></testsuite>'
    known = "9 tests/ranks/test_a.py::test_other\n8 tests/ranks/test_a.py::test_one\n"
    assert costly_of(report, known) == "9 tests/ranks/test_a.py::test_other\n7 tests/ranks/test_a.py::test_one\n"
