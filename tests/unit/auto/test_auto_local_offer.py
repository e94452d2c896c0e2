"""Which local steps auto takes, by the simulator's times on made-up profiles: no ranks."""

import msgspec
import pytest
from test_auto_offers import TENSORS, cluster, costs, profile, shared_nodes

from gradwire.auto.accuracy import LOCAL_SPECS, check_schedules, schedules_of
from gradwire.auto.local import EVERY, EXPOSED, averaged, local_offer, streamed, worth
from gradwire.auto.planning import Offer
from gradwire.auto.trial import Candidate, Trial
from gradwire.core import Link, Profile
from gradwire.core.schedules import LocalSteps
from gradwire.core.specs import Identity, Spec
from gradwire.plan import Uniform
from gradwire.plan.policy import Policy
from gradwire.sim.simulator import Simulator

COSTS = costs(LOCAL_SPECS)


def offered(gbps: float, of: Profile | None = None, specs: tuple[Spec, ...] = LOCAL_SPECS) -> Offer:
    made = local_offer(of or profile(), cluster(gbps), COSTS, specs)
    assert made is not None
    return made


def schedule_of(offer: Offer) -> LocalSteps:
    assert isinstance(offer.plan.schedule, LocalSteps)
    return offer.plan.schedule


@pytest.mark.parametrize("gbps", [0.5, 0.2, 0.1, 0.03, 0.01])
def test_the_fewest_steps_between_exchanges_that_wait_little(gbps: float) -> None:
    """Nothing that is preferred would do: all of it is simulated here."""
    simulator, most_us = Simulator(profile(), cluster(gbps), COSTS), profile().compute_us / (1 - EXPOSED)
    ways = [(s, spec) for every in EVERY for s in (averaged(every), streamed(every)) for spec in LOCAL_SPECS]
    step_us = [simulator.step_us(Policy(default=spec, schedule=way).plan(TENSORS, 2)) for way, spec in ways]
    first = next(at for at, us in enumerate(step_us) if us <= most_us)
    made = offered(gbps)
    assert (made.plan.schedule, made.plan.buckets[0].spec) == ways[first]
    assert made.candidate.predicted_us == pytest.approx(step_us[first])


def test_slower_links_get_more_steps_between_exchanges() -> None:
    every = [schedule_of(offered(gbps)).every for gbps in (1.0, 0.03, 0.01, 0.003, 0.001)]
    assert every == sorted(every) and len(set(every)) >= 3


def test_where_nothing_will_do_the_shortest_step_is_offered() -> None:
    made = offered(1e-5)
    assert schedule_of(made).every == max(EVERY)
    assert made.candidate.predicted_us > profile().compute_us / (1 - EXPOSED)


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
