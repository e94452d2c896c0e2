"""Which local steps auto takes, by the simulator's times on made-up profiles: no ranks."""

import json
import math
from statistics import geometric_mean
from typing import Any

import msgspec
import pytest
from test_auto_offers import TENSORS, cluster, costs, profile, shared_nodes

from benchmarks import local
from benchmarks.common import RESULTS
from benchmarks.local_equal import WAYS, arm_of
from benchmarks.losses import HALFWAY, above_ddp
from benchmarks.paired import differences
from gradwire.auto.accuracy import LOCAL_SPECS, SPARSELOCO, check_schedules, schedules_of
from gradwire.auto.decision import AutoDecision, Tried
from gradwire.auto.local import local_offer, worth
from gradwire.auto.local_losses import (
    AT_CONSTANT_RATE,
    DOUBLING,
    EVERY,
    SPARSE_AT_CONSTANT_RATE,
    STEEPNESS,
    averaged,
    loss_above,
    steps_to_make_up,
    streamed,
)
from gradwire.auto.planning import Offer
from gradwire.auto.trial import Candidate, Trial
from gradwire.core import Link, Profile
from gradwire.core.schedules import LocalSteps
from gradwire.core.specs import QSGD, ErrorFeedback, Identity, Spec
from gradwire.errors import PlanError
from gradwire.plan import Uniform
from gradwire.plan.policy import Policy
from gradwire.sim import Simulator, rules_of

COSTS = costs(LOCAL_SPECS)


def offered(gbps: float, of: Profile | None = None, specs: tuple[Spec, ...] = LOCAL_SPECS) -> Offer:
    made = local_offer(of or profile(), cluster(gbps), COSTS, specs)
    assert made is not None
    return made


def schedule_of(offer: Offer) -> LocalSteps:
    assert isinstance(offer.plan.schedule, LocalSteps)
    return offer.plan.schedule


@pytest.mark.parametrize("gbps", [1.0, 0.1, 0.03, 0.01, 0.003, 1e-5])
def test_the_shortest_time_to_a_loss_is_offered(gbps: float) -> None:
    """All schedules and specs with a measured loss are simulated here."""
    simulator, to_loss_us = Simulator(profile(), cluster(gbps), COSTS, rules_of("cpu", cluster(gbps))), {}
    for way, spec in ((way(every), spec) for every in EVERY for way in (averaged, streamed) for spec in LOCAL_SPECS):
        if (above := loss_above(way, spec)) is not None:
            step_us = simulator.step_us(Policy(default=spec, schedule=way).plan(TENSORS, 2))
            to_loss_us[way, spec] = step_us * steps_to_make_up(above)
    made = offered(gbps)
    chosen = schedule_of(made), made.plan.buckets[0].spec
    assert made.candidate.to_loss_us == pytest.approx(to_loss_us[chosen])
    assert to_loss_us[chosen] <= 1.02 * min(to_loss_us.values())
    assert made.candidate.loss_above == loss_above(*chosen)


def test_slower_links_pay_more_loss_for_shorter_steps() -> None:
    made = [offered(gbps) for gbps in (1.0, 0.1, 0.02, 0.01)]
    above = [offer.candidate.loss_above for offer in made]
    assert above == sorted(above) and len(set(above)) == 4
    assert offered(1e-5).plan.buckets[0].spec == SPARSELOCO


@pytest.mark.parametrize(("ranks", "more"), [(2, 0.0), (3, DOUBLING), (4, DOUBLING), (5, 2 * DOUBLING), (16, 3 * DOUBLING)])
def test_more_ranks_end_higher_and_the_line_says_from_what_it_is_known(ranks: int, more: float) -> None:
    wide = msgspec.structs.replace(cluster(0.01), nodes=ranks)
    made = local_offer(profile(), wide, COSTS, LOCAL_SPECS)
    assert made is not None
    above = loss_above(schedule_of(made), made.plan.buckets[0].spec)
    assert above is not None and made.candidate.loss_above == pytest.approx(above + more, abs=6e-5)
    local = Tried("local", 1.0, None, 0, made.candidate.steps_for_one, made.candidate.loss_above)
    plain = Tried("plain", 1.0, 1.0, 3)
    line = str(AutoDecision(5, "at the start", local, plain, (plain,), 5, 0.0, 0.0, instead_of=plain, ranks=ranks))
    assert ("for each doubling" in line) == (ranks > 2) and f"end {100 * made.candidate.loss_above:.1f} % above" in line


def test_what_has_no_measured_loss_is_not_offered() -> None:
    assert loss_above(streamed(30), ErrorFeedback(QSGD(bits=2))) is None
    assert loss_above(averaged(20), QSGD(bits=4)) is None
    assert local_offer(profile(), cluster(0.01), costs([QSGD(bits=3)]), [QSGD(bits=3)]) is None


def test_losses_are_those_that_were_measured() -> None:
    """The table of docs/local_steps.md is made of the same file."""
    finals = json.loads((RESULTS / "local-equal.json").read_text())["finals"]["transformer"]
    for way, (spec, schedule) in WAYS.items():
        for every in EVERY:
            if (known := loss_above(schedule(every), spec)) is not None:
                measured = differences(finals, arm_of(way, every), "loss")
                assert known == pytest.approx(sum(measured) / len(measured), abs=6e-5), (way, every)
    on_four = json.loads((RESULTS / "local-equal-4.json").read_text())["finals"]["transformer"]
    more = differences(on_four, arm_of("4 bits, own", 5), "loss")
    assert loss_above(averaged(5), QSGD(bits=4), 4) == pytest.approx(sum(more) / len(more), abs=6e-5)
    losses = json.loads((RESULTS / "losses.json").read_text())["finals"]["transformer"]
    assert pytest.approx(math.log2(1 + above_ddp(losses, HALFWAY)), abs=5e-5) == STEEPNESS


def test_steps_for_one_are_those_of_the_races() -> None:
    """On two ranks, with the table of docs/local_steps.md."""
    results = [json.loads(path.read_text()) for path in local.FOLDER.glob("*.json")]
    over: dict[bool, list[float]] = {True: [], False: []}
    for result in local.longest([each for each in results if each["nodes"] == 2]):
        for name, expected, found in local.steps_rows(result):
            over[name == "SparseLoCo"] += [each / expected for each in found[1:] if each is not None]
    for sparse, rate in ((False, AT_CONSTANT_RATE), (True, SPARSE_AT_CONSTANT_RATE)):
        assert rate * geometric_mean(over[sparse]) == pytest.approx(rate, abs=6e-3)
        assert min(over[sparse]) >= 0.79 and max(over[sparse]) <= 1.295
    known = [local.said_over_took(name, found, result) for result in results for name, found in result["methods"].items()]
    said = [each for each in known if each is not None]
    assert len(said) == 8 and sum(0.8 <= each <= 1.25 for each in said) == 7, "docs/local_steps.md names the eighth"


def test_the_decision_says_how_long_it_takes_to_learn_as_much() -> None:
    plain = Tried("plain", 5e5, 4e5, 3)
    made = Tried("local", 2e5, None, 0, 1.5, 0.02, steps_at_constant_rate=2.0)
    decision = AutoDecision(5, "at the start", made, plain, (plain,), 5, 0.0, 3e5, instead_of=plain)
    assert decision.seconds_for(1000) == pytest.approx(400.0)
    assert "it has what 1,000 steps of synchronous SGD learn after about 400 s" in str(decision)
    assert AutoDecision(5, "at the start", plain, plain, (plain,), 5, 0.0, 0.0).seconds_for(10) == pytest.approx(4.0)


def test_what_cannot_be_encoded_is_sent_as_it_is() -> None:
    made = offered(0.1, profile("float64"), ())
    assert {spec for bucket in made.plan.buckets for spec in bucket.specs} == {Identity()}


def test_fewer_tensors_than_fragments_are_not_streamed() -> None:
    few = msgspec.structs.replace(profile(), tensors=profile().tensors[:2])
    assert all(schedule_of(offered(gbps, few)).fragments == 1 for gbps in (0.1, 0.01, 0.001))


def test_ranks_may_share_nodes() -> None:
    nodes = shared_nodes(Link(50.0, 40.0), Link(50.0, 0.05))
    made = local_offer(profile(), nodes, COSTS, LOCAL_SPECS)
    assert made is not None and "hierarchical" in made.candidate.name


@pytest.mark.parametrize(
    ("took_us", "exposed_us", "steps_for_one", "is_worth"),
    [
        (200.0, 100.0, 1.0, True),
        (200.0, 15.0, 1.0, False),  # it waits for less than a tenth
        (110.0, 60.0, 1.0, False),  # local steps are not shorter
        (110.0, 60.0, 2.0, True),  # they are, for the same progress
    ],
)
def test_local_steps_are_the_last_resort(took_us: float, exposed_us: float, steps_for_one: float, is_worth: bool) -> None:
    trial = Trial([Candidate("A", 90.0, steps_for_one=steps_for_one)])
    while trial.turn is not None:
        trial.took(took_us)
    local = Offer(Candidate("B", 110.0), Uniform(Identity()).plan(TENSORS))
    assert worth(local, trial, 0, exposed_us) == is_worth
    assert not worth(None, trial, 0, exposed_us)


def test_local_steps_are_allowed_by_name_and_not_among_those_that_are_tried() -> None:
    assert check_schedules(("backward", "local")) == ("backward", "local")
    assert schedules_of("safe", ("backward", "local"), 2) == ()


@pytest.mark.parametrize("wrong", [None, 3, [[]]])
def test_schedules_are_words(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"schedules is (None|3|\[\]): it must be one of backward"):
        check_schedules(wrong)
