"""What plan="auto" decides on made-up times: no ranks, no clocks."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.auto.changes import WINDOW, Change, ChangeSigns
from gradwire.auto.trial import (
    BUDGET_PLAIN_STEPS,
    LEAST_BUDGET_US,
    MOST_STEPS,
    PLAIN_FACTOR,
    Candidate,
    Trial,
)


def tried(
    real_us: dict[str, float],
    noise: Callable[[], float] = lambda: 1.0,
    current: int | None = None,
    predicted_us: dict[str, float] | None = None,
    steps: int = 3,
    spent_us: float = 0.0,
) -> Trial:
    """A trial of candidates whose steps take so long; the one called 'plain' is plain all-reduce."""
    guess = predicted_us or real_us
    candidates = [Candidate(name, guess[name], plain=name == "plain") for name in real_us]
    trial = Trial(candidates, current, steps, spent_us)
    while (turn := trial.turn) is not None:
        trial.took(real_us[trial.candidates[turn.candidate].name] * noise())
    return trial


def chosen(trial: Trial) -> str:
    assert trial.chosen is not None
    return trial.candidates[trial.chosen].name


def ran(trial: Trial) -> list[str]:
    return [candidate.name for candidate, times in zip(trial.candidates, trial.times, strict=True) if times]


@pytest.mark.parametrize(
    ("real_us", "expected"),
    [
        ({"A": 50.0, "B": 60.0, "plain": 100.0}, "A"),
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
    others = [Candidate("A", 60.0, loss=1), Candidate("plain", 100.0, plain=True)]
    trial = Trial(sorted([lossy, *others], key=lambda each: each.to_loss_us))
    real = dict(zip(("lossy", "A", "plain"), real_us, strict=True))
    while (turn := trial.turn) is not None:
        trial.took(real[trial.candidates[turn.candidate].name])
    assert chosen(trial) == expected


def test_a_wrong_prediction_of_the_first_lets_others_run() -> None:
    trial = tried({"A": 300.0, "B": 150.0, "plain": 100.0}, predicted_us={"A": 100.0, "B": 145.0, "plain": 290.0})
    assert ran(trial) == ["A", "B", "plain"] and chosen(trial) == "plain"


@pytest.mark.parametrize(("first_us", "others"), [(100.0, []), (104.0, []), (115.0, ["B"]), (130.0, ["B", "C"])])
def test_what_runs_follows_from_the_error_of_predictions(first_us: float, others: list[str]) -> None:
    """B is predicted to be 12 % slower than A, C 25 %."""
    guess = {"A": 100.0, "B": 112.0, "C": 125.0, "plain": 500.0}
    trial = tried({"A": first_us, "B": 200.0, "C": 200.0, "plain": 500.0}, predicted_us=guess)
    assert ran(trial) == ["A", *others] and chosen(trial) == "A"


@pytest.mark.parametrize(("predicted_us", "runs"), [(PLAIN_FACTOR * 100 - 1, True), (PLAIN_FACTOR * 100 + 1, False)])
def test_plain_runs_only_where_it_is_predicted_to_come_close(predicted_us: float, runs: bool) -> None:
    trial = tried({"A": 100.0, "plain": 90.0}, predicted_us={"A": 100.0, "plain": predicted_us})
    assert ("plain" in ran(trial)) is runs and chosen(trial) == ("plain" if runs else "A")
    assert trial.plain_us == (90.0 if runs else predicted_us)


@pytest.mark.parametrize(("measured_us", "runs"), [(131.0, True), (129.0, False)])
def test_plain_runs_where_the_best_plan_takes_longer_than_plain_is_predicted_to(measured_us: float, runs: bool) -> None:
    trial = tried({"A": measured_us, "plain": 110.0}, predicted_us={"A": 100.0, "plain": 130.0})
    assert ("plain" in ran(trial)) is runs and chosen(trial) == ("plain" if runs else "A")


@pytest.mark.parametrize(("predicted_us", "runs"), [(97.0, True), (99.0, False)])
def test_what_costs_accuracy_runs_only_if_it_is_predicted_to_be_faster(predicted_us: float, runs: bool) -> None:
    trial = Trial([Candidate("A", 100.0, loss=1), Candidate("B", predicted_us, loss=2)])
    while (turn := trial.turn) is not None:
        trial.took((100.0, 90.0)[turn.candidate])
    assert chosen(trial) == ("B" if runs else "A")


@pytest.mark.parametrize(("measured_us", "runs"), [(115.0, True), (101.0, False)])
def test_what_encodes_runs_where_plain_takes_longer_than_predicted(measured_us: float, runs: bool) -> None:
    """What the prediction of plain all-reduce left out is not in that of a plan which encodes."""
    trial = Trial([Candidate("plain", 100.0, plain=True), Candidate("4 bits", 106.0, loss=1)])
    while (turn := trial.turn) is not None:
        trial.took((measured_us, 106.0)[turn.candidate])
    assert (ran(trial) == ["plain", "4 bits"]) == runs
    assert chosen(trial) == ("4 bits" if runs else "plain")


@pytest.mark.parametrize(("steps_us", "ran"), [((151.0,), 1), ((149.0, 116.0), 2), ((149.0, 114.0, 100.0), 3)])
def test_a_turn_ends_with_the_first_step_that_is_clearly_slow(steps_us: tuple[float, ...], ran: int) -> None:
    trial = Trial([Candidate("A", 100.0), Candidate("B", 101.0)])
    for us in (100.0, 100.0, 100.0, *steps_us):
        assert trial.turn is not None and trial.turn.candidate == (trial.steps >= 3)
        trial.took(us)
    assert trial.steps == 3 + ran and (trial.turn is None or trial.turn.candidate == 0)


def test_a_first_step_in_new_memory_is_not_the_time_of_a_plan() -> None:
    trial = Trial([Candidate("A", 100.0), Candidate("B", 101.0)])
    for us in (100.0, 100.0, 100.0, 130.0, 90.0, 90.0):
        assert trial.turn is not None and trial.turn.candidate == (trial.steps >= 3)
        trial.took(us)
    assert trial.chosen == 1 and trial.median_us(1) == 90.0


@pytest.mark.parametrize(("spent_us", "steps"), [(0.0, 3), (1.1e6, 3), (1.3e6, 2), (9e6, 2)])
def test_a_first_turn_is_shorter_where_the_budget_ends(spent_us: float, steps: int) -> None:
    trial = tried({"A": 300_000.0, "plain": 390_000.0}, spent_us=spent_us)
    assert ran(trial) == ["A"] and trial.steps == 3 + steps and len(trial.times[0]) == steps - 1


def test_turns_are_interleaved_while_the_best_two_are_alike() -> None:
    trial = Trial([Candidate("A", 1.0), Candidate("B", 1.0), Candidate("C", 1.04)])
    order: list[int] = []
    while (turn := trial.turn) is not None:
        order.append(turn.candidate)
        trial.took((1.0, 1.01, 1.2)[turn.candidate])
    assert [candidate for candidate, _ in itertools.groupby(order)] == [0, 1, 2, 0, 1]


@settings(max_examples=200)
@given(
    plain=st.floats(1e4, 1e6),
    others=st.lists(st.floats(0.2, 5.0), min_size=0, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_choice_is_never_clearly_slower_than_plain(plain: float, others: list[float], seed: int) -> None:
    """Steps vary by 5 % around their mean, and predictions are 10 % wrong, in either direction."""
    chance = random.Random(seed)
    real = {f"c{index}": plain * factor for index, factor in enumerate(others)} | {"plain": plain}
    guess = {name: us * chance.uniform(0.9, 1.1) for name, us in real.items()}
    real = dict(sorted(real.items(), key=lambda item: guess[item[0]]))
    trial = tried(real, noise=lambda: chance.gauss(1.0, 0.05), predicted_us=guess)
    assert real[chosen(trial)] <= 1.25 * min(real.values())


@settings(max_examples=300)
@given(
    plain=st.floats(1e3, 5e6),
    others=st.lists(st.floats(0.02, 50.0), min_size=1, max_size=4),
    spent=st.floats(0, 2e6),
    wrong=st.floats(0.3, 3.0),
)
def test_deciding_takes_no_more_steps_and_time_than_it_may(plain: float, others: list[float], spent: float, wrong: float) -> None:
    """The first turn always runs; a turn that seemed to fit may take longer than was predicted."""
    guess = {f"c{index}": plain * factor for index, factor in enumerate(others)} | {"plain": plain}
    guess = dict(sorted(guess.items(), key=lambda item: item[1]))
    trial = tried({name: wrong * us for name, us in guess.items()}, predicted_us=guess, spent_us=spent)
    assert trial.steps <= MOST_STEPS
    first = 3 * wrong * min(guess.values())
    budget = max(LEAST_BUDGET_US, BUDGET_PLAIN_STEPS * max(1.0, wrong) * plain)
    assert trial.total_us <= 1.0001 * max(spent + first, max(1.0, wrong) * budget)


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


@pytest.mark.parametrize(("seen_us", "expected"), [(60.0, "seen"), (79.0, "A"), (90.0, "A")])
def test_what_ran_before_the_trial_is_chosen_where_nothing_else_is_as_fast(seen_us: float, expected: str) -> None:
    seen = Candidate("seen", 50.0, loss=2, seen_us=seen_us, runs=False)
    trial = Trial([Candidate("A", 50.0, loss=1), Candidate("plain", 55.0, plain=True), seen])
    while (turn := trial.turn) is not None:
        trial.took((80.0, 100.0)[turn.candidate])
    assert chosen(trial) == expected and ran(trial) == ["A", "plain"]
    assert trial.median_us(2) == seen_us


def test_a_turn_counts_more_than_the_time_from_before_the_trial() -> None:
    trial = Trial([Candidate("A", 50.0, seen_us=200.0), Candidate("plain", 90.0, plain=True)])
    while (turn := trial.turn) is not None:
        trial.took((50.0, 90.0)[turn.candidate])
    assert chosen(trial) == "A" and trial.median_us(0) == 50.0


def test_what_deciding_takes_beside_steps_is_in_its_cost() -> None:
    trial = Trial([Candidate("A", 100.0), Candidate("plain", 110.0, plain=True)])
    while trial.turn is not None:
        trial.spend(7.0)
        trial.took(100.0)
    assert trial.cost_us == pytest.approx(7.0 * trial.steps)


# ---- watching


class Run:
    """A run of which each step has the values that `values` says at the time: of steps, links, computation and inputs."""

    def __init__(self, values: Callable[[int], tuple[float, float, float, float]], seed: int = 0, spread: float = 0.0) -> None:
        self.values, self.chance, self.spread = values, random.Random(seed), spread
        self.signs, self.step = ChangeSigns(), 0
        self.noticed: list[tuple[int, Change]] = []

    def go(self, steps: int, begin: bool = True) -> None:
        """Windows are looked at a step after they end. After each change there is a new beginning."""
        while self.step < steps:
            window = []
            for _ in range(WINDOW):
                step_us, link_us, compute_us, inputs = self.values(self.step)
                noise = self.chance.gauss(1.0, self.spread)
                window.append((step_us * noise, link_us * self.chance.gauss(1.0, 2 * self.spread), compute_us, inputs))
                self.step += 1
            change = self.signs.window(*zip(*window, strict=True))
            if change is not None:
                self.noticed.append((self.step + 1, change))
                if begin:
                    self.signs.begin()


def test_a_link_that_drops_and_returns_is_noticed_within_10_and_20_steps() -> None:
    """1000 Mb/s, then 100 from step 203 to step 603."""
    run = Run(lambda step: (100.0 + 400 * (203 <= step < 603), 450.0 if 203 <= step < 603 else 45.0, 100.0, 1.0))
    run.go(1000)
    (down, dropped), (up, returned) = run.noticed
    assert 203 < down <= 213 and 603 < up <= 623
    assert dropped.of == returned.of == "links"
    assert dropped.link == pytest.approx(10.0) and returned.link == pytest.approx(0.1)


def test_a_faster_link_is_seen_though_the_step_is_not_shorter() -> None:
    """All of the exchange is hidden; only the lanes' time on links tells."""
    run = Run(lambda step: (100.0, 80.0 if step < 203 else 8.0, 100.0, 1.0))
    run.go(600)
    assert [203 < step <= 213 and change.of == "links" for step, change in run.noticed] == [True]


def test_a_larger_batch_is_noticed_and_is_not_taken_for_a_link() -> None:
    run = Run(lambda step: (100.0, 50.0, 90.0, 64.0) if step < 203 else (150.0, 50.0, 140.0, 96.0))
    run.go(600)
    ((step, change),) = run.noticed
    assert 203 < step <= 220 and change.of == "batch"
    assert change.batch == 1.5 and change.compute == pytest.approx(140 / 90)


def test_a_busy_processor_is_no_sign() -> None:
    """Steps become three times as long, exchanges a little."""
    run = Run(lambda step: (300.0, 65.0, 280.0, 64.0) if 100 <= step < 132 else (100.0, 50.0, 90.0, 64.0))
    run.go(600)
    assert run.noticed == []


@pytest.mark.parametrize(("planned_us", "noticed"), [(300.0, True), (90.0, False), (0.0, False)])
def test_a_plan_made_while_the_processor_was_busy_is_made_again(planned_us: float, noticed: bool) -> None:
    run = Run(lambda step: (100.0, 50.0, 90.0, 64.0))
    run.signs.begin(planned_us)
    run.go(60, begin=False)
    assert [change.of for _, change in run.noticed][:1] == ["compute"] * noticed
    assert not noticed or (run.noticed[0][0] >= 40 and run.noticed[0][1].compute == pytest.approx(0.3))


def test_inputs_of_varying_length_are_no_new_batch() -> None:
    chance = random.Random(0)
    run = Run(lambda step: (100.0, 50.0, 90.0, 32.0 * chance.randint(60, 100)))
    run.go(2000)
    assert run.noticed == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_sign(seed: int) -> None:
    run = Run(lambda step: (100.0, 50.0, 90.0, 64.0), seed, spread=0.1)
    run.go(4000)
    assert run.noticed == []
