"""Latency apart from what a message takes: messages of an exchange overlap, and so do exchanges of two lanes."""

import json

import msgspec
import pytest

from gradwire.core import (
    ALL_REDUCE,
    COLLECTIVES,
    QSGD,
    Backward,
    Bucket,
    Cluster,
    CodecCosts,
    Costs,
    Delayed,
    Identity,
    Link,
    LocalSteps,
    Pipelined,
    Plan,
    Profile,
    TensorProfile,
    fingerprint,
)
from gradwire.costs.collectives import flat_traffic, sum_traffic
from gradwire.costs.fit import fit_link
from gradwire.errors import FormatError
from gradwire.plan import launch_of
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import explain_plan, make_plan
from gradwire.planner.starts import ddp_draft
from gradwire.sim import Simulator, simulate
from gradwire.sim.rules import Rules, as_ddp, placed, rules_of

FAR = Link(25_000.0, 1.0, message_us=100.0)
SPEC = QSGD(bits=4)
TWO_PHASES = COLLECTIVES["alltoall"].on("cpu")


def profile(count: int = 2, **fields: float) -> Profile:
    tensors = [
        TensorProfile(name=f"t{i}", shape=(1000, 100), dtype="float32", backward_us=100.0, forward_us=0.0) for i in range(count)
    ]
    return Profile(model="m", batch=1, device="cpu", tensors=tensors, **fields)


def cluster(link: Link, nodes: int = 8, **fields: object) -> Cluster:
    return Cluster(nodes=nodes, ranks_per_node=1, intra=link, inter=link, **fields)


def plan(option: tuple[str, ...], spec: QSGD | Identity, count: int = 2) -> Plan:
    buckets = tuple(Bucket(tensors=(f"t{i}",), spec=spec, option=option) for i in range(count))
    infos = profile(count).tensor_infos("cpu")
    return Plan(fingerprint=fingerprint(infos), schedule=Backward(), buckets=buckets, launch=launch_of(buckets, Backward()))


COSTS = Costs(codecs=[CodecCosts(spec=SPEC, device="cpu", encode=[(0, 30.0)], decode=[(0, 20.0)])])


ALONE = msgspec.structs.replace(rules_of("cpu"), reports=False)
"""For exchanges without the reports that follow them."""


def step_us(shape: Cluster, what: Plan, rules: Rules = ALONE, **fields: float) -> float:
    return Simulator(profile(len(what.buckets), **fields), shape, COSTS, rules).step_us(what)


@pytest.mark.parametrize("nodes", [2, 3, 8, 32])
def test_messages_of_a_direct_exchange_overlap_and_those_of_a_ring_wait(nodes: int) -> None:
    others = nodes - 1
    direct = flat_traffic("alltoall", nodes, 1, "direct").time_us(0, FAR, FAR)
    assert direct == pytest.approx(25_000 + 100 * (others - 1))
    assert flat_traffic("allreduce", nodes, 1, "direct").time_us(0, FAR, FAR) == pytest.approx(2 * others * 25_000)
    plain = msgspec.structs.replace(FAR, message_us=None)
    assert flat_traffic("alltoall", nodes, 1, "direct").time_us(0, plain, plain) == others * 25_000


def test_stages_of_halving_wait_and_the_messages_of_a_stage_do_not() -> None:
    small, _ = sum_traffic("allreduce", 12, 1)
    assert small.rounds == (0, 6) and small.inter.messages == 8
    assert small.time_us(0, FAR, FAR) == pytest.approx(6 * 25_000 + 2 * 100)


@pytest.mark.parametrize(("word", "routing", "nodes"), [("alltoall", "direct", 5), ("allreduce", "wires", 6)])
def test_a_fit_finds_the_link_from_times_with_overlap(word: str, routing: str, nodes: int) -> None:
    sizes = [0, 1000, 4000, 16_000]
    traffic = sum_traffic(word, nodes, 1)[0] if routing == "wires" else flat_traffic(word, nodes, 1, routing)
    points = [(size, traffic.time_us(size, FAR, FAR)) for size in sizes]
    link, _ = fit_link(points, word, nodes, routing, message_us=100.0)
    assert (link.alpha_us, link.gbps, link.message_us) == pytest.approx((25_000, 1.0, 100.0))


def test_exchanges_of_two_lanes_wait_at_the_same_time_but_send_one_after_the_other() -> None:
    """Two buckets of 400 KB: each sum takes 6 rounds of 25 ms; bytes and messages keep the link busy for 6.2 ms."""
    shape = cluster(FAR)
    alone = step_us(shape, plan(ALL_REDUCE, Identity(), 1))
    busy_us = 6 * 100 + 1.75 * 400_000 * 8e-3
    assert alone == pytest.approx(100 + 6 * 24_900 + busy_us)
    together = step_us(shape, plan(ALL_REDUCE, Identity(), 2))
    assert together == pytest.approx(alone + busy_us), "the second one begins when the link is free"
    old = cluster(msgspec.structs.replace(FAR, message_us=None))
    assert step_us(old, plan(ALL_REDUCE, Identity(), 2)) == pytest.approx(2 * alone - 100)


def test_a_timeline_shows_latency_as_exposed_communication_and_not_as_work_of_the_link() -> None:
    timeline = simulate(plan(ALL_REDUCE, Identity(), 1), profile(1), cluster(FAR), COSTS, ALONE)
    (link,) = (resource for resource in timeline.resources if resource.name == "inter link")
    assert link.busy_us == pytest.approx(6 * 100 + 1.75 * 400_000 * 8e-3)
    assert timeline.exposed_comm_us == pytest.approx(timeline.step_us - 100)
    assert timeline.idle_us == pytest.approx(0)


def test_a_gpu_holds_the_link_for_the_whole_exchange() -> None:
    shape, us = cluster(FAR), []
    for count in (1, 2):
        us.append(Simulator(profile(count), shape, COSTS, rules_of("gpu")).step_us(plan(ALL_REDUCE, Identity(), count)))
    assert us[1] == pytest.approx(2 * us[0] - 100)


@pytest.mark.parametrize(("alpha_us", "nodes", "levels"), [(25_000.0, 2, 1), (25_000.0, 40, 2), (1_900.0, 2, 0)])
def test_a_step_over_a_far_link_ends_with_the_reports_of_all_ranks(alpha_us: float, nodes: int, levels: int) -> None:
    """They leave after the last task, and many ranks need two hops. Over a near link they take no time."""
    shape = cluster(Link(alpha_us, 1.0, message_us=100.0), nodes)
    for schedule, part in ((Backward(), 1.0), (LocalSteps(every=4), 0.25), (Pipelined(), 0.0)):
        what = msgspec.structs.replace(plan(TWO_PHASES, SPEC), schedule=schedule)
        what = msgspec.structs.replace(what, launch=launch_of(what.buckets, schedule))
        alone, both = (step_us(shape, what, rules) for rules in (ALONE, rules_of("cpu")))
        assert both - alone == pytest.approx(part * levels * alpha_us), schedule
    timeline = simulate(plan(TWO_PHASES, SPEC), profile(), shape, COSTS, rules_of("cpu"))
    assert timeline.idle_us == pytest.approx(levels * alpha_us)
    assert simulate(plan(TWO_PHASES, SPEC), profile(), shape, COSTS, as_ddp(shape, rules_of("cpu"))[1]).idle_us == 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_the_next_exchange_of_a_delayed_plan_waits_for_the_reports_of_the_last_one(lanes: int) -> None:
    """A step that computes for longer than both hides both. No lane runs ahead."""
    shape, rules = cluster(FAR, nodes=2), msgspec.structs.replace(rules_of("cpu"), lanes=lanes)
    one = plan(TWO_PHASES, SPEC, 3)
    exchange_us = step_us(shape, one, msgspec.structs.replace(rules, reports=False)) - 100 * 3
    late = msgspec.structs.replace(one, schedule=Delayed(k=None))
    assert step_us(shape, late, rules) == pytest.approx(exchange_us + 25_000, rel=0.01)
    long_us = exchange_us + 30_000
    assert step_us(shape, late, rules, optimizer_us=long_us, processor_part=0.0) == pytest.approx(long_us + 300)


def test_processor_time_of_an_exchange_runs_beside_it_and_excludes_computation() -> None:
    """An all-to-all and an all-gather of 8 ranks have 7 messages of 10 us of a processor each."""
    link = Link(1000.0, 1000.0, message_us=1.0, cpu_us=10.0)
    timeline = simulate(plan(TWO_PHASES, SPEC, 1), profile(1), cluster(link), COSTS, rules_of("cpu"))
    launches = [event for event in timeline.events if event.what == "launch"]
    assert [event.end_us - event.start_us for event in launches] == pytest.approx([70.0, 70.0])
    assert {event.resource for event in launches} == {"compute"}
    without = msgspec.structs.replace(link, cpu_us=0.0)
    assert timeline.step_us == pytest.approx(step_us(cluster(without), plan(TWO_PHASES, SPEC, 1))), "shorter than the exchange"
    slow = step_us(cluster(msgspec.structs.replace(link, cpu_us=1000.0)), plan(TWO_PHASES, SPEC, 1))
    assert slow == pytest.approx(100 + 30 * 2 + 20 * 8 + 2 * 7000, rel=0.01), "an exchange takes as long as its processor time"


def test_ranks_that_share_a_processor_take_longer_for_messages() -> None:
    link = Link(10.0, 1000.0, message_us=1.0, cpu_us=100.0)
    few, many = (step_us(cluster(link, processors=each), plan(TWO_PHASES, SPEC, 1)) for each in (1, 0.1))
    assert many > 8 * few


def test_codecs_leave_compute_where_computation_leaves_a_processor() -> None:
    link, rules = Link(1.0, 1000.0), rules_of("cpu")
    awake, asleep = profile(), profile(processor_part=0.05)
    assert placed(rules, awake, cluster(link)) == ("compute", 1)
    assert placed(rules, awake, cluster(link, processors=0.25)) == ("compute", 1)
    assert placed(rules, awake, cluster(link, processors=1.5)) == ("compute", 1)
    assert placed(rules, awake, cluster(link, processors=1.93)) == ("own thread", 1), "two, measured a little short"
    assert placed(rules, awake, cluster(link, processors=2)) == ("own thread", 1)
    assert placed(rules, awake, cluster(link, processors=9)) == ("own thread", 2), "there are two lanes"
    assert placed(rules, asleep, cluster(link, processors=0.25)) == ("own thread", 1)
    assert placed(rules, profile(processor_part=4.0), cluster(link, processors=5)) == ("own thread", 1)
    assert placed(rules, profile(processor_part=4.0), cluster(link, processors=4)) == ("compute", 1)
    assert placed(rules_of("gpu"), asleep, cluster(link)) == ("compute", 1)
    busy = (
        step_us(cluster(link), plan(TWO_PHASES, SPEC, 2)),
        step_us(cluster(link), plan(TWO_PHASES, SPEC, 2), processor_part=0.0),
    )
    assert busy[1] < busy[0], "the first bucket's encode runs in the second one's backward"


def test_codecs_wait_for_scripts_on_a_processor_that_ranks_share() -> None:
    """Two buckets are ready after 100 us each: a script that needs 0.4 of the time keeps the processor for 40 us each."""
    link, made = Link(1.0, 1000.0), plan(TWO_PHASES, SPEC, 2)
    times = {
        (processors, part): step_us(cluster(link, processors=processors), made, processor_part=part)
        for processors in (None, 0.25)
        for part in (0.0, 0.4)
    }
    assert times[0.25, 0.0] < times[0.25, 0.4] <= times[0.25, 0.0] + 80
    assert times[None, 0.0] == times[None, 0.4], "a rank with a processor to itself"
    timeline = simulate(made, profile(2, processor_part=0.4), cluster(link, processors=0.25), COSTS, rules_of("cpu"))
    assert timeline.step_us == times[0.25, 0.4]
    assert {event.bucket for event in timeline.events if event.resource == "cpu pool"} == {0, 1}


def test_ddp_is_predicted_with_its_own_all_reduce() -> None:
    own, ddp = Link(10.0, 8.0), Link(50.0, 4.0)
    shape = cluster(own, allreduce=own, ddp=ddp)
    job = PlanningJob(profile(), shape, COSTS, [SPEC])
    made = job.plan(joint(job), ddp_draft(job))
    of_ddp, rules = as_ddp(shape, rules_of("cpu"))
    assert made.prediction is not None
    assert not rules.reports, "its ranks report nothing"
    expected = simulate(plan_of_ddp(job), profile(), of_ddp, COSTS, rules).step_us
    assert made.prediction.baseline_step_us == pytest.approx(expected)
    assert expected > job.simulator.step_us(job.light(ddp_draft(job))), "the all-reduce of DDP is slower here"
    assert as_ddp(cluster(own), rules_of("cpu")) == (cluster(own), msgspec.structs.replace(ALONE, routing="direct"))


@pytest.mark.parametrize("inside", [False, True])
def test_ddp_goes_around_a_ring_of_any_number_of_ranks(inside: bool) -> None:
    """gradwire halves small sums, and larger ones of more than 16 ranks. torch's process group never does."""
    steps = []
    for ranks in (2, 8, 16, 17, 32, 64):
        nodes, ranks_per_node = (1, ranks) if inside else (ranks, 1)
        shape = Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=Link(1000.0, 10.0), inter=Link(1000.0, 10.0))
        job = PlanningJob(profile(), shape, COSTS)
        made = plan_of_ddp(job)
        assert made.prediction is not None
        steps.append(made.prediction.baseline_step_us)
        assert steps[-1] >= 2 * (ranks - 1) * 1000.0
    assert steps == sorted(steps)


def test_a_plan_slower_than_ddp_says_why_and_what_helps() -> None:
    """Two ranks sum in two hops of 25 ms, and their reports take one more. Pipelined plans wait for none."""
    shape, said = cluster(FAR, nodes=2), {}
    for schedule in ("backward", "pipelined"):
        job = PlanningJob(profile(), shape, COSTS, limits=Limits(schedule=schedule))
        made = make_plan(job)
        assert made.plan.prediction is not None
        step, ddp = made.plan.prediction.step_us, made.plan.prediction.baseline_step_us
        assert (step > ddp) == (schedule == "backward")
        said[schedule] = explain_plan(job, made)
    assert "ms slower than plain DDP. Each step ends with reports of all ranks" in said["backward"]
    assert "25.000 ms over this far link. Use --schedule pipelined" in said["backward"]
    assert "slower than plain DDP" not in said["pipelined"]


def plan_of_ddp(job: PlanningJob) -> Plan:
    return job.plan(ddp_draft(job), ddp_draft(job))


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_beats_the_bound_where_latency_overlaps(seed: int) -> None:
    link = Link(100.0 * 3**seed, 0.5, message_us=20.0, cpu_us=3.0, cpu_us_per_byte=1e-4)
    shape = cluster(link, nodes=2 + seed, processors=1 + seed % 3)
    job = PlanningJob(profile(6, processor_part=0.1 * (seed % 2)), shape, COSTS, [SPEC])
    draft = joint(job)
    assert job.lower_bound_us() <= job.simulator.step_us(job.light(draft))


def test_old_files_are_read_and_written_as_before() -> None:
    links = {name: {"alpha_us": alpha_us, "gbps": 1} for name, alpha_us in (("intra", 1), ("inter", 9))}
    old = Cluster.from_json(json.dumps({"version": 1, "nodes": 2, "ranks_per_node": 1} | links))
    assert old.inter == Link(9, 1) and old.inter.message_us is None and old.ddp is None
    assert not {"message_us", "ddp"} & {word for word in ("message_us", "ddp") if word in old.to_json()}
    new = msgspec.structs.replace(old, inter=FAR, ddp=FAR)
    assert Cluster.from_json(new.to_json()) == new
    assert "processor_part" not in profile().to_json()
    with pytest.raises(FormatError, match="message_us is 30"):
        Link(20.0, 1.0, message_us=30.0)
    with pytest.raises(FormatError, match="ddp is 3"):
        cluster(FAR, ddp=3)
