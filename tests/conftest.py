"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks to run functions on; see worlds.py."""
    kept = Worlds()
    yield kept
    kept.close()
