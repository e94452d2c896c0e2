"""What the planner promises of any job, and that its searches plan with the prices of the simulator."""

import random
from functools import partial

import pytest

from benchmarks.papers.oracle import pareto
from benchmarks.random_jobs import check_many
from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Identity, Link, Pipelined, Profile, TensorProfile
from gradwire.costs.prices import CurveCost
from gradwire.errors import PlanError
from gradwire.plan.schemes import SYSTEMS
from gradwire.planner.drafts import Choice, Draft, Limits, Part, PlanningJob
from gradwire.planner.methods import make_plan
from gradwire.planner.pareto import improved
from gradwire.planner.partition import Fusion, FusionCosts, evaluate
from gradwire.planner.starts import by_lines, close_before, fused
from gradwire.sim.simulator import FS_PER_US
from gradwire.sim.timeline import simulate

CODEC = CodecCosts(
    spec=QSGD(),
    device="cpu",
    encode=[(4096, 20.0), (2**20, 300.0), (2**24, 5000.0)],
    decode=[(4096, 15.0), (2**20, 200.0), (2**24, 3500.0)],
)

_MORE = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("first", [*range(0, 60, 10), *(pytest.param(n, marks=_MORE) for n in range(60, 200, 10))])
def test_promises_hold_of_random_jobs(first):
    assert not check_many(first, 10)["counterexamples"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(10_000, 11_000, 100))
def test_promises_hold_of_many_random_jobs(first):
    assert not check_many(first, 100)["counterexamples"]


def cpu_job(launch_us, limits=None, specs=None):
    rng = random.Random(0)
    rows = [
        TensorProfile(
            name=f"t{place}",
            shape=(int(400 * 2 ** rng.uniform(-2, 2)), 256) if place % 2 == 0 else (256,),
            dtype="float32",
            backward_us=2000 * rng.random(),
            forward_us=500.0,
        )
        for place in range(40)
    ]
    profile = Profile(model="made up", batch=1, device="cpu", tensors=rows)
    cluster = Cluster(nodes=4, ranks_per_node=1, intra=Link(5.0, 10.0), inter=Link(100.0, 0.19), launch_us=launch_us)
    return PlanningJob(profile, cluster, Costs(codecs=[CODEC]), [QSGD()] if specs is None else specs, limits)


def test_fusion_knows_of_launches():
    planned_us, rule_us = (make_plan(cpu_job(6411.0), method).plan.prediction.step_us for method in ("fusion", "bucket"))
    assert planned_us < rule_us
    unaware = cpu_job(6411.0).step(make_plan(cpu_job(0.0), "fusion").draft) / FS_PER_US
    assert planned_us < 0.95 * unaware


@pytest.mark.parametrize("launch_us", [0.0, 400.0, 6411.0])
def test_fusion_costs_are_the_tasks_that_are_simulated(launch_us):
    """Of any size: the sums of a bucket's tasks by the simulator, launches included."""
    job = cpu_job(launch_us, Limits(exempt_vectors=False))
    for choice in job.choices():
        costs = job.fusion_costs(choice)
        for tensors in ((0,), (2, 4), tuple(range(40))):
            nbytes = sum(job.profile.tensors[place].nbytes for place in tensors)
            bucket = job.light(Draft((Part(tensors, choice),))).buckets[0]
            priced = sum(price.us for price in job.simulator.prices.of(bucket).tasks)
            folded = costs.encode(nbytes) + costs.exchange(nbytes) + costs.decode(nbytes)
            assert folded == pytest.approx(priced, rel=0.01)


@pytest.mark.parametrize("decoding", ["exposed", "lumped"])
@pytest.mark.parametrize("seed", range(30))
def test_fusion_by_curves_is_the_best_of_all(seed, decoding):
    rng = random.Random(seed)
    tensors = rng.randint(1, 12)
    times = [rng.choice([0.0, 100.0 * rng.random()]) for _ in range(tensors)]
    sizes = [rng.choice([0, 10, 1000, 100_000]) * rng.random() for _ in range(tensors)]
    curves = []
    for _ in range(3):
        start, rate = 50 * rng.random(), 10 ** rng.uniform(-5, -2)
        points = [(size, start + rate * size * rng.uniform(0.5, 1.5)) for size in (0.0, 1e3, 1e4, 1e5)]
        curves.append(CurveCost(tuple(points[: rng.randint(1, 4)])))
    costs = FusionCosts(encode=curves[0], exchange=curves[1], decode=curves[2], decoding=decoding)
    ends = by_lines(times, sizes, costs)
    found, certain = improved(times, sizes, costs, Fusion(ends, evaluate(ends, times, sizes, costs)))
    assert certain
    assert found.step_us == pytest.approx(pareto(times, sizes, costs).step_us, rel=1e-9)
    assert found.step_us == evaluate(found.boundaries, times, sizes, costs)


def test_fusion_by_curves_stops_after_so_many_buckets():
    costs = FusionCosts(encode=CurveCost(((0.0, 1.0),)), exchange=CurveCost(((0.0, 2.0), (10.0, 3.0))))
    times, sizes, known = [1.0] * 50, [4.0] * 50, (50,)
    start = Fusion(known, evaluate(known, times, sizes, costs))
    found, certain = improved(times, sizes, costs, start, most=10)
    assert (found, certain) == (start, False)
    assert improved(times, sizes, costs, start)[0].step_us < start.step_us


@pytest.mark.parametrize("specs", [[], [QSGD()]])
def test_a_pipelined_plan_is_no_slower_than_dears_buckets_nor_than_its_bound(specs):
    job = cpu_job(50.0, Limits(schedule="pipelined"), specs)
    made = make_plan(job)
    assert made.plan.schedule == Pipelined()
    assert made.plan.prediction.step_us == simulate(made.plan, job.profile, job.cluster, job.simulator.prices.costs).step_us
    in_two_phases = Choice(Identity(), SYSTEMS["DeAR"][0])
    for mib in (5, 8, 16, 32):
        assert job.step(made.draft) <= job.step(fused(job, partial(close_before, limit=mib * 2**20), in_two_phases))
    assert job.lower_bound_us() <= made.plan.prediction.step_us


def test_a_plan_of_sums_is_faster_where_gathers_hide_in_the_forward():
    pipelined, backward = (make_plan(cpu_job(50.0, Limits(schedule=word), [])).plan for word in ("pipelined", "backward"))
    assert pipelined.prediction.step_us < 0.99 * backward.prediction.step_us
    assert pipelined.prediction.baseline_step_us == backward.prediction.baseline_step_us
    assert any(bucket.gathers for bucket in pipelined.buckets)


def test_the_schedule_of_a_plan_must_fit():
    with pytest.raises(PlanError, match="schedule is 'delayed'"):
        Limits(schedule="delayed")
    with pytest.raises(PlanError, match="plain DDP, which exchanges in backward alone"):
        make_plan(cpu_job(50.0, Limits(schedule="pipelined")), "ddp")
