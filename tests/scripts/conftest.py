"""Fixtures of tests that run whole programs."""

from collections.abc import Iterator

import pytest

from gradwire.testbed import namespaces, permission_problem
from gradwire.testbed.namespaces import needs_user_namespace


def why_not() -> str | None:
    problem = permission_problem()
    if problem is None and needs_user_namespace():
        return "not root: run pytest under `unshare -Urnm --map-root-user` with a tmpfs on /run"
    return problem


@pytest.fixture
def clean() -> Iterator[None]:
    """For tests that make namespaces: skip where none can be made, and see that none of this process stays."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    yield
    assert namespaces.existing(f"gradwire-{namespaces.this_owner()}-") == []
