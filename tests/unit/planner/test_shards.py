"""Sizes of shards by uplinks: against a search over many sizes, and in plans."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Identity, Link, Plan, Profile, TensorProfile, pairs_ranks
from gradwire.errors import FormatError
from gradwire.planner import Limits, PlanningJob, explain_plan, make_plan, plans_for_slow_node
from gradwire.planner.shards import least_us, shares_of

EVEN, SLOW = Link(30.0, 1.0), Link(30.0, 1.0, up_gbps=0.25)
RATES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=3, max_size=4)


@settings(max_examples=40, deadline=None)
@given(rates=RATES)
def test_no_sizes_take_the_slowest_node_less_time(rates: list[float]) -> None:
    shares = shares_of(rates) or (1,) * len(rates)
    own = least_us(1e6, rates, shares)
    others = (each for each in itertools.product(range(7), repeat=len(rates)) if sum(each))
    assert own <= 1.01 * min(least_us(1e6, rates, each) for each in others)


def test_shares_of_thousands_of_nodes_are_not_all_nothing() -> None:
    shares = shares_of((1.0,) * 2499 + (0.25,))
    assert min(shares[:-1]) > 50 and shares[-1] < min(shares[:-1])


def job_of(cluster: Cluster) -> PlanningJob:
    tensors = [TensorProfile(name=f"w{at}", shape=(512, 512), dtype="float32", backward_us=500.0) for at in range(8)]
    profile = Profile(model="made up", batch=1, device="cpu", steps=1, optimizer_us=10.0, tensors=tuple(tensors))
    return PlanningJob(profile, cluster, Costs(codecs=()), [Identity()])


def cluster_of(**fields: object) -> Cluster:
    return Cluster(**{"nodes": 4, "ranks_per_node": 1, "intra": EVEN, "inter": EVEN} | fields)


def test_the_planner_gives_the_slow_uplink_no_shard() -> None:
    named, unknown = cluster_of(slow_nodes=[SLOW], slow_at=[2]), cluster_of(slow_nodes=[SLOW])
    made = make_plan(job_of(named), "even")
    direct = [bucket for bucket in made.plan.buckets if "alltoall:inter" in bucket.option]
    assert bool(made.plan.shares) == bool(direct)
    assert not make_plan(job_of(unknown), "even").plan.shares
    assert not make_plan(job_of(cluster_of()), "even").plan.shares
    if direct:
        assert made.plan.shares[2] == 0 and "Shards are by uplinks" in explain_plan(job_of(named), made)
        assert Plan.from_json(made.plan.to_json()) == made.plan


def test_plans_for_a_slow_node_have_the_shards_of_the_clusters_own_slow_uplinks() -> None:
    spec, cluster = QSGD(bits=4), cluster_of(slow_nodes=[SLOW], slow_at=[2])
    codec = CodecCosts(spec=spec, device="cpu", encode=[(4096, 12.0), (2**22, 400.0)], decode=[(4096, 9.0), (2**22, 250.0)])
    costs, profile, limits = Costs(codecs=[codec]), job_of(cluster).profile, Limits(max_encodes=2)
    own = make_plan(PlanningJob(profile, cluster, costs, [spec], limits), "even").plan
    plans = plans_for_slow_node(profile, cluster, costs, [1.0, 4.0], [spec], limits, method="even")
    assert own.shares and own.shares[2] == 0
    assert [plan.shares for plan in plans.values()] == [(), *[own.shares] * (len(plans) - 1)] and len(plans) > 1


def test_shares_are_written_only_where_there_are_some() -> None:
    plan = make_plan(job_of(cluster_of()), "ddp").plan
    assert "shares" not in json.loads(plan.to_json())


@pytest.mark.parametrize("slow_at", [[4], [1, 1], [0, 1], 1])
def test_nodes_that_cannot_be_are_refused(slow_at: object) -> None:
    with pytest.raises(FormatError, match="slow_at"):
        cluster_of(slow_nodes=[SLOW], slow_at=slow_at)


@pytest.mark.parametrize(("uneven", "pairs"), [(False, True), (True, False)])
def test_no_ranks_are_paired_where_nodes_have_different_numbers(uneven: bool, pairs: bool) -> None:
    job = PlanningJob(job_of(cluster_of()).profile, cluster_of(ranks_per_node=3, uneven=uneven), Costs(codecs=()))
    assert any(pairs_ranks(option.tasks) for option in job.options) == pairs
    assert any("reduce:intra" in option.tasks for option in job.options)
    alone = cluster_of(nodes=1, ranks_per_node=3, uneven=uneven)
    assert alone.ranks_per_node_if_even == 3, "one node differs from none"
