"""Which cases of a test run where not all do; tests/conftest.py says where."""

import zlib
from typing import Any

import pytest

__all__ = ["chance", "sample", "values_that_run"]


def sample(cases: list[pytest.Function], most: int, in_order: bool = False) -> set[pytest.Function]:
    """At most so many cases, each the one that adds most values of parameters to those before it, until every value of every
    parameter occurs; the same in every run. in_order: of equal ones take the first as written, not any."""
    ordered = cases if in_order else sorted(cases, key=chance)
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in ordered}
    kept: set[pytest.Function] = set()
    seen: set[tuple[str, int]] = set()
    while len(kept) < most:
        case = max(values, key=lambda each: len(values[each] - seen))  # the first of equal ones
        if values[case] <= seen:
            break
        kept.add(case)
        seen |= values[case]
    return kept


def values_that_run(request: pytest.FixtureRequest, parameter: str, of: str) -> set[Any]:
    """The values of a parameter in those tests of the file that run and have the fixture `of`."""
    cases = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return {case.callspec.params[parameter] for case in cases if of in case.fixturenames and parameter in case.callspec.params}


def chance(case: pytest.Function) -> int:
    """A number that is the same in every run, and has nothing to do with the case's place."""
    return zlib.crc32(case.name.encode())
