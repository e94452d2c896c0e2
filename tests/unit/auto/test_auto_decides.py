"""What plan="auto" decides on made-up times: no ranks, no clocks."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.auto.trial import Candidate, Trial, allowance_us
from gradwire.auto.watch import WINDOW, Drift, Watch


def tried(
    real_us: dict[str, float],
    noise: Callable[[], float] = lambda: 1.0,
    current: int | None = None,
    predicted_us: dict[str, float] | None = None,
    known_us: float = math.inf,
) -> Trial:
    """A trial of candidates whose steps take so long; the one called 'plain' is plain all-reduce."""
    guess = predicted_us or real_us
    trial = Trial([Candidate(name, guess[name], plain=name == "plain") for name in real_us], current, known_us)
    while (turn := trial.turn) is not None:
        us = real_us[trial.candidates[turn.candidate].name]
        trial.took(us * noise())
    return trial


def chosen(trial: Trial) -> str:
    assert trial.chosen is not None
    return trial.candidates[trial.chosen].name


@pytest.mark.parametrize(
    ("real_us", "expected"),
    [
        ({"A": 50.0, "B": 60.0, "plain": 100.0}, "A"),
        ({"A": 60.0, "B": 50.0, "plain": 100.0}, "B"),
        ({"A": 99.0, "B": 120.0, "plain": 100.0}, "plain"),  # 1 % is no gain
        ({"A": 97.0, "B": 120.0, "plain": 100.0}, "A"),
        ({"A": 100.0, "B": 100.0, "plain": 100.0}, "plain"),
        ({"A": 50.0, "B": 50.0, "plain": 100.0}, "A"),  # a tie: the best by prediction
        ({"plain": 100.0}, "plain"),
    ],
)
def test_the_fastest_is_chosen_and_plain_where_nothing_gains(real_us: dict[str, float], expected: str) -> None:
    assert chosen(tried(real_us)) == expected


def test_of_plans_that_are_alike_the_most_accurate_is_taken() -> None:
    trial = Trial([Candidate("A", 50.0, loss=3), Candidate("B", 50.0, loss=1), Candidate("plain", 90.0, plain=True)])
    while (turn := trial.turn) is not None:
        trial.took((50.0, 50.5, 90.0)[turn.candidate])
    assert chosen(trial) == "B"


@pytest.mark.parametrize(("lossy_us", "expected"), [(30.0, "A"), (22.0, "lossy"), (18.0, "lossy")])
def test_what_needs_more_steps_for_a_loss_has_to_be_faster_by_as_much(lossy_us: float, expected: str) -> None:
    real_us = (lossy_us, 60.0, 100.0)
    lossy = Candidate("lossy", lossy_us, loss=2, steps_for_one=2.5)
    trial = Trial([lossy, Candidate("A", 60.0, loss=1), Candidate("plain", 100.0, plain=True)])
    while (turn := trial.turn) is not None:
        trial.took(real_us[turn.candidate])
    assert chosen(trial) == expected
    # what deciding cost is told in steps, not in what they do
    spent = sum(us * len(times) for us, times in zip(real_us, trial.times, strict=True))
    assert 0 <= trial.cost_us < spent + 3 * sum(real_us)


def test_predictions_that_are_wrong_do_not_decide() -> None:
    trial = tried({"A": 300.0, "plain": 100.0}, predicted_us={"A": 10.0, "plain": 500.0})
    assert chosen(trial) == "plain"


def test_turns_are_interleaved() -> None:
    trial = Trial([Candidate("A", 1.0), Candidate("B", 1.0), Candidate("plain", 1.0, plain=True)])
    order: list[int] = []
    while (turn := trial.turn) is not None:
        order.append(turn.candidate)
        trial.took(100.0)
    assert [candidate for candidate, _ in itertools.groupby(order)][:6] == [0, 1, 2, 0, 1, 2]


@settings(max_examples=200)
@given(
    plain=st.floats(10, 1000),
    others=st.lists(st.floats(0.2, 5.0), min_size=0, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_choice_is_never_clearly_slower_than_plain(plain: float, others: list[float], seed: int) -> None:
    """Steps vary by 10 % around their mean."""
    chance = random.Random(seed)
    real = {f"c{index}": plain * factor for index, factor in enumerate(others)} | {"plain": plain}
    trial = tried(real, noise=lambda: chance.gauss(1.0, 0.1))
    assert real[chosen(trial)] <= 1.15 * min(real.values())
    assert trial.steps <= 70


@settings(max_examples=200)
@given(plain=st.floats(10, 1000), others=st.lists(st.floats(0.02, 50.0), min_size=1, max_size=4))
def test_deciding_costs_what_it_may(plain: float, others: list[float]) -> None:
    real = {f"c{index}": plain * factor for index, factor in enumerate(others)} | {"plain": plain}
    known_us = 1.5 * plain
    trial = tried(real, known_us=known_us)
    # a look is three steps, however fast those turn out to be that come later; one step where that is hopeless, which is seen
    # when it ends
    looks = sum(us if us > 4 * known_us else 3 * us for us in real.values())
    assert trial.cost_us <= allowance_us(min(real.values()), plain) + looks


@pytest.mark.parametrize(("plain_us", "most"), [(100.0, 1), (20.0, 3)])
def test_plain_is_hardly_run_where_it_is_much_slower(plain_us: float, most: int) -> None:
    trial = Trial([Candidate("A", 10.0), Candidate("B", 11.0), Candidate("plain", 100.0, plain=True)])
    steps = [0, 0, 0]
    while (turn := trial.turn) is not None:
        steps[turn.candidate] += 1
        trial.took((10.0, 11.0, plain_us)[turn.candidate])
    assert steps[2] == most
    assert chosen(trial) == "A"


@pytest.mark.parametrize(("known_us", "looks"), [(math.inf, 1), (30.0, 1), (20.0, 0)])
def test_plain_is_not_run_where_it_is_predicted_to_be_hopeless(known_us: float, looks: int) -> None:
    trial = tried({"A": 20.0, "B": 22.0, "plain": 100.0}, known_us=known_us)
    assert len(trial.times[2]) == looks and trial.plain_us == 100.0
    assert chosen(trial) == "A"
    # but what runs already is looked at, whatever is predicted
    assert (
        chosen(
            tried({"plain": 20.0, "B": 22.0}, current=0, predicted_us={"plain": 100.0, "B": 22.0}, known_us=known_us)
        )
        == "plain"
    )


@pytest.mark.parametrize(("plain_us", "looks", "expected"), [(100.0, 1, "A"), (50.0, 1 + 4, "plain")])
def test_plain_that_will_hardly_be_chosen_is_looked_at_for_one_step(plain_us: float, looks: int, expected: str) -> None:
    real_us = (60.0, plain_us)
    trial = Trial([Candidate("A", 60.0), Candidate("plain", 100.0, plain=True)], known_us=60.0)
    while (turn := trial.turn) is not None:
        trial.took(real_us[turn.candidate])
    assert len(trial.times[1]) == looks and chosen(trial) == expected


def test_what_runs_goes_on_unless_something_is_clearly_faster() -> None:
    assert chosen(tried({"A": 100.0, "B": 97.0, "plain": 200.0}, current=0)) == "A"
    assert chosen(tried({"A": 100.0, "B": 95.0, "plain": 200.0}, current=0)) == "B"
    assert chosen(tried({"plain": 100.0, "B": 97.0}, current=0)) == "plain"
    assert chosen(tried({"A": 99.0, "plain": 100.0}, current=0)) == "A"
    assert chosen(tried({"A": 101.0, "plain": 100.0}, current=0)) == "plain"


def test_a_candidate_that_cannot_run_is_left_out() -> None:
    trial = Trial([Candidate("A", 10.0), Candidate("plain", 100.0, plain=True)])
    trial.leave_out()
    while (turn := trial.turn) is not None:
        assert turn.candidate == 1
        trial.took(100.0)
    assert chosen(trial) == "plain"


# ---- watching


class Run:
    """A run of which each step takes what `step_us` says at the time, under the plan that was chosen last."""

    def __init__(self, step_us: Callable[[int, str], tuple[float, float]], seed: int = 0, spread: float = 0.0) -> None:
        self.step_us, self.chance, self.spread = step_us, random.Random(seed), spread
        self.watch, self.step, self.plan = Watch(), 0, "A"
        self.noticed: list[tuple[int, Drift]] = []
        self.changes = 0
        self.watch.chosen(0, self.plan, step_us(0, self.plan)[0])

    def go(self, steps: int, decide: Callable[[int], str]) -> None:
        """Windows are looked at a step after they end. A decision takes 20 steps."""
        until = self.step + steps
        while self.step < until:
            window = []
            for _ in range(WINDOW):
                step_us, link_us = self.step_us(self.step, self.plan)
                noise = self.chance.gauss(1.0, self.spread)
                window.append((step_us * noise, link_us * self.chance.gauss(1.0, 2 * self.spread)))
                self.step += 1
            steps_us, links_us = zip(*window, strict=True)
            drift = self.watch.window(self.step + 1, steps_us, links_us)
            if drift is None:
                continue
            self.noticed.append((self.step + 1, drift))
            self.step += 20
            plan = decide(self.step)
            self.changes += plan != self.plan
            self.plan = plan
            self.watch.chosen(self.step, plan, self.step_us(self.step, plan)[0])


def drop_and_return(step: int, plan: str) -> tuple[float, float]:
    """1000 Mb/s, then 100 from step 203 to step 603; A is best at 1000, B at 100."""
    slow = 203 <= step < 603
    exchange = {"A": 40.0, "B": 25.0}[plan] * (10 if slow else 1)
    codec = {"A": 0.0, "B": 30.0}[plan]
    return max(100.0 + codec, exchange), exchange


def test_a_link_that_drops_and_returns_is_noticed_both_times_within_50_steps() -> None:
    run = Run(drop_and_return)
    run.go(1000, lambda step: "B" if 203 <= step < 603 else "A")
    (down, _), (up, returned) = run.noticed
    assert down > 203 and down + 20 <= 253
    assert up > 603 and up + 20 <= 653
    assert returned.of_links
    assert run.changes == 2


def test_a_faster_link_is_seen_though_the_step_is_not_shorter() -> None:
    """All of the exchange is hidden; only the lanes' time on links tells."""
    run = Run(lambda step, plan: (100.0, 80.0 if step < 203 else 8.0))
    run.go(600, lambda step: "A")
    assert 203 < run.noticed[0][0] <= 253
    assert run.noticed[0][1].of_links and run.noticed[0][1].step == pytest.approx(1.0)


def test_a_larger_batch_is_noticed_and_is_not_taken_for_a_link() -> None:
    run = Run(lambda step, plan: (100.0 if step < 203 else 150.0, 50.0))
    run.go(600, lambda step: "A")
    (step, drift), *others = run.noticed
    assert 203 < step <= 253 and not drift.of_links and not others


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_changes(seed: int) -> None:
    run = Run(lambda step, plan: (100.0, 50.0), seed, spread=0.1)
    run.go(4000, lambda step: "B" if run.plan == "A" else "A")
    assert run.noticed == []


def test_times_that_go_up_and_down_for_ever_are_answered_less_and_less() -> None:
    """A neighbour that comes and goes every 60 steps: each answer leads to the plan that was left, and waits double."""
    run = Run(lambda step, plan: (100.0 * (1 + (step // 60) % 2), 50.0))
    run.go(20_000, lambda step: "B" if run.plan == "A" else "A")
    steps = [step for step, _ in run.noticed]
    assert len(steps) <= 12
    assert steps[-1] - steps[-2] > 4 * (steps[2] - steps[1])


def test_what_deciding_takes_beside_steps_is_in_its_cost() -> None:
    trial = Trial([Candidate("A", 90.0), Candidate("plain", 100.0, plain=True)])
    while trial.turn is not None:
        trial.spend(7.0)
        trial.took(100.0)
    assert trial.cost_us == pytest.approx(7.0 * trial.steps)
