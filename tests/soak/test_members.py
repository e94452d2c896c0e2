"""Members of an elastic job that come and go: some events of each plan. `python -m soak.members` runs more."""

from importlib.util import find_spec

import pytest
from interpreters import Interpreters

from soak.members import come_and_go, passed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: pip install '.[elastic]'"),
]


@pytest.mark.parametrize("plan", ["exact", "4 bits", "2 bits with feedback", "low rank", "local"])
def test_members_that_come_and_go_end_with_equal_weights(interpreters: Interpreters, plan: str) -> None:
    seen = come_and_go(interpreters, plan, events=8, seed=len(plan), size=3)
    assert passed(seen), seen
