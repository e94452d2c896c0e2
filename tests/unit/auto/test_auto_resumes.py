"""What plan="auto" does with a plan that another run chose: no ranks, a live job of one rank's view."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gradwire.auto.accuracy import all_specs, first_policy, schedules_of
from gradwire.auto.driver import Auto, _beyond
from gradwire.core import QSGD, Delayed, ErrorFeedback, Identity, Pipelined, Plan, TensorInfo
from gradwire.plan import Policy, Uniform

TENSORS = [
    TensorInfo("emb", (400, 100), "float32", embedding=True),
    TensorInfo("w", (300, 500), "float32"),
    TensorInfo("wide", (30, 50), "float64"),
    TensorInfo("b", (500,), "float32"),
]


class OneRank:
    """What the driver sees of a job, on rank 0."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        self.plan, self.ranks, self.step = plan, ranks, 7
        self.infos, self.everybody, self.queues = TENSORS, True, False
        self.group = SimpleNamespace(rank=0, world_size=ranks)
        self.exposed_us, self.warms_up = 0.0, False

    def hold(self, on: bool) -> None: ...

    def time_device(self, on: bool) -> None: ...

    def plan_of(self, policy: Policy) -> Plan:
        return policy.plan(TENSORS, self.ranks)

    def change_to(self, plan: Plan) -> None:
        self.plan = plan

    def exchange(self, numbers: list[float]) -> Any:
        return lambda: [list(numbers)] * self.ranks

    def from_all(self, text: str) -> list[str]:
        return [text] * self.ranks

    def made_by_first(self, make: Any, instead: str) -> str:
        """Rank 0 cannot plan."""
        return ""


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with mock.patch("gradwire.auto.driver.Live", lambda job: job), mock.patch("gradwire.auto.driver.say"):
        yield


def resumed(plan: Plan, ranks: int, schedules: tuple[str, ...] = ("backward",)) -> tuple[Auto, Any]:
    """A driver that took up a plan of a decided run, and its job."""
    driver, live = Auto("safe", schedules, ranks), OneRank(plan, ranks)
    assert driver.refuses(plan, plan) == ""
    driver.resumed(live, SimpleNamespace(chosen=None, searching=False, own=False))  # type: ignore[arg-type]
    return driver, live


@pytest.mark.parametrize(("saved", "ranks"), [(16, 4), (4, 16), (4, 8), (16, 32)])
def test_a_plan_that_loses_too_much_on_so_many_ranks_ends_with_the_first_step(saved: int, ranks: int) -> None:
    """It is not measured either, so that it cannot be chosen."""
    driver, live = resumed(first_policy("safe", TENSORS, saved).plan(TENSORS, saved), ranks)
    assert _beyond(live.plan, all_specs("safe", ranks))
    driver._settle(live, 1e3)
    assert live.plan == live.plan_of(first_policy("safe", TENSORS, ranks))
    assert not _beyond(live.plan, all_specs("safe", ranks)) and driver._steps == 0


@pytest.mark.parametrize("accuracy", ["exact", "safe", "aggressive", 0.004, 0.03])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 17, 64, 10_000])
def test_the_first_plan_of_a_run_stays_until_times_are_measured(accuracy: str | float, ranks: int) -> None:
    driver, plan = Auto(accuracy, ("backward",), ranks), first_policy(accuracy, TENSORS, ranks).plan(TENSORS, ranks)
    assert driver._allows(plan)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_delayed_plan_of_two_ranks_is_taken_up_and_kept_on_two_alone(ranks: int) -> None:
    schedule = schedules_of("safe", ("delayed",), 2)[-1]
    plan = Uniform(ErrorFeedback(QSGD(bits=4)), schedule=schedule).plan(TENSORS, ranks)
    driver, live = resumed(plan, ranks, ("backward", "delayed"))
    assert (driver._current == plan) == (ranks == 2)
    driver._settle(live, 1e3)
    assert live.plan == live.plan_of(first_policy("safe", TENSORS, ranks))


def test_a_delayed_plan_of_another_class_is_refused() -> None:
    plan = Uniform(ErrorFeedback(QSGD(bits=4)), schedule=Delayed(k=100)).plan(TENSORS, 4)
    assert "does not allow the saved plan's Delayed(k=100)" in Auto("safe", ("backward", "delayed"), 4).refuses(plan, plan)
    assert "accuracy='exact' does not allow" in Auto("exact", ("backward", "delayed"), 2).refuses(plan, plan)


def test_the_chosen_plan_goes_on_where_rank_0_cannot_plan_again() -> None:
    """Times are measured under the first policy, in the schedule `backward`."""
    chosen = Uniform(Identity(), schedule=Pipelined()).plan(TENSORS, 2)
    driver, live = resumed(chosen, 2, ("backward", "pipelined"))
    driver._settle(live, 1e3)
    assert live.plan.schedule != chosen.schedule
    driver._offer(live, 1e3)
    assert live.plan == chosen == driver._current and driver._phase == driver._watching
