"""Members of an elastic job that come and go: some events of each plan. `python -m soak.members` runs more."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crowd import Crowd, Member, taking_part
from elastic_member import End
from interpreters import Interpreters

from soak.members import come_and_go, compared, passed

WELL = {"ended": [0, 0], "crashed": [], "last": 1, "unequal": [], "left": []}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: pip install '.[elastic]'")
@pytest.mark.parametrize(
    "plan",
    ["2 bits with feedback", "exact", "4 bits", "low rank", "local"],
)
def test_members_that_come_and_go_end_with_equal_weights(interpreters: Interpreters, plan: str) -> None:
    seen = come_and_go(interpreters, plan, events=8, seed=len(plan), size=3)
    assert passed(seen), seen


@pytest.mark.parametrize(("loss", "well"), [(1.0, True), (1.009, True), (1.011, False), (float("nan"), False)])
def test_a_loss_passes_up_to_1_percent_above_the_mean_of_the_undisturbed_runs(loss: float, well: bool) -> None:
    assert passed({**WELL, **compared(loss, [0.98, 1.0, 1.02])}) == well


def wrote(*lines: tuple[int, int], goes: bool = False) -> Any:
    """A member that wrote these steps, with the members whose gradients count."""
    said = [{"step": step, "taking_part": count} for step, count in lines]
    return SimpleNamespace(steps=said, goes=goes, counted=Member.counted.fget(SimpleNamespace(steps=said, goes=goes)))


def test_samples_of_members_that_are_gone_count() -> None:
    gone, joiner = wrote((1, 2), (2, 2), (3, 9), goes=True), wrote((3, 2), (4, 3))
    assert taking_part([gone, joiner]) == {1: 2, 2: 2, 3: 2, 4: 3}
    crowd = SimpleNamespace(all=[gone, joiner], _batch=16, falls_after=3)
    assert Crowd.samples_before_the_fall(crowd) == 16 * 6  # type: ignore[arg-type]


def test_a_step_that_a_joiner_made_again_counts_all_who_trained() -> None:
    assert taking_part([wrote((7, 3)), wrote((7, 2))]) == taking_part([wrote((7, 2)), wrote((7, 3))]) == {7: 3}


def test_the_rate_falls_to_0_in_the_steps_that_the_file_names(tmp_path: Path) -> None:
    end = End(tmp_path)
    assert end.rate(1000) == 1.0 and not end.is_reached(1000)
    (tmp_path / "end").write_text("100 300")
    assert [end.rate(step) for step in (0, 100, 150, 299, 300)] == [1.0, 1.0, 0.75, 1 / 200, 0.0]
    assert not end.is_reached(299) and end.is_reached(300)
    (tmp_path / "end").write_text("100 100")
    assert end.rate(99) == 1.0 and end.is_reached(100)
