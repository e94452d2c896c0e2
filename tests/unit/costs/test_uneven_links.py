"""Links that are not all alike: an uplink slower than the downlink, a limit of one flow, and slow nodes."""

import json
from itertools import product

import msgspec
import pytest
from test_shared_links import FAST, WORDS, job, pairs

from gradwire.auto.measuring import wire_us
from gradwire.core import Bucket, Cluster, Costs, Identity, Link, Plan, TensorInfo
from gradwire.costs.collectives import flat_traffic, group_traffic
from gradwire.costs.prices import Prices
from gradwire.errors import FormatError, PlanError
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import METHODS, make_plan
from gradwire.planner.slow_node import plans_for_slow_node, slow_cases, steps_with_slow_node
from gradwire.planner.sweep import clusters, sweep_methods
from gradwire.sim.simulator import FS_PER_US

GBPS = Link(0.0, 8.0)
"""A byte takes 0.001 us."""
DIRECT = [word for word in WORDS if word != "allreduce"]
ALL_TO_ALL = ("alltoall:inter", "allgather:inter")


def us_by_pairs(word: str, nodes: int, local: int, links: list[Link]) -> float:
    """Microseconds of 1000 bytes a rank, by counting: every node's bytes and flows in both directions, by each of the links."""
    times, sent = [0.0], pairs(word, nodes * local)
    for node, link in product(range(nodes), links):
        own = range(node * local, (node + 1) * local)
        out = [part for (a, b), part in sent.items() if a in own and b not in own]
        into = [part for (a, b), part in sent.items() if b in own and a not in own]
        for flows, gbps in ((out, link.up_gbps or link.gbps), (into, link.gbps)):
            times.append(sum(flows) * 8 / gbps)
            times += [part * 8 / link.flow_gbps for part in flows if link.flow_gbps]
    return max(times)


@pytest.mark.parametrize("word", DIRECT)
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (4, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize(
    "links",
    [
        [GBPS],
        [Link(0.0, 8.0, up_gbps=2.0)],
        [Link(0.0, 8.0, up_gbps=80.0)],
        [Link(0.0, 8.0, flow_gbps=3.0)],
        [Link(0.0, 8.0, up_gbps=6.0, flow_gbps=1.5), GBPS],
        [GBPS, Link(0.0, 5.0), Link(0.0, 9.0, up_gbps=1.0)],
    ],
)
def test_exchanges_take_what_counting_pairs_gives(word: str, nodes: int, local: int, links: list[Link]):
    expected = us_by_pairs(word, nodes, local, links)
    assert flat_traffic(word, nodes, local, "direct").time_us(1000.0, FAST, *links) == pytest.approx(expected)


@pytest.mark.parametrize("word", DIRECT)
def test_groups_of_a_node_share_its_directions_and_flows(word: str):
    """The 3 ranks of a node exchange with those of other nodes at the same time, each with its own."""
    link = Link(0.0, 8.0, up_gbps=6.0, flow_gbps=1.0)
    alone = group_traffic(word, 4, "inter", "direct")
    together = group_traffic(word, 4, "inter", "direct", flows=3)
    for one, three in ((alone.up, together.up), (alone.down, together.down)):
        assert one is not None and three == (3 * one.factor, 3 * one.at_once)
    limits = [max(3 * way.factor / gbps, way.factor / way.at_once) for way, gbps in ((alone.up, 6.0), (alone.down, 8.0))]
    assert together.time_us(1000.0, FAST, link) == pytest.approx(8 * max(limits))


def test_an_all_to_all_waits_for_the_slowest_node():
    traffic = group_traffic("alltoall", 4, "inter")  # each node sends 3/4 of 1000 bytes
    assert traffic.time_us(1000.0, FAST, Link(10.0, 8.0), Link(20.0, 2.0)) == 3 * 20.0 + 3.0
    # a quick node changes nothing
    assert traffic.time_us(1000.0, FAST, Link(10.0, 8.0), Link(10.0, 80.0)) == 3 * 10.0 + 0.75


def test_the_slower_direction_counts():
    consumer = Link(10.0, 80.0, up_gbps=8.0)
    for word, sent in (("alltoall", 0.75), ("allgather", 3.0), ("allreduce", 1.5)):
        traffic = group_traffic(word, 4, "inter", "direct")
        assert traffic.time_us(1000.0, FAST, consumer) == pytest.approx(traffic.inter.messages * 10.0 + sent)
    # a root receives 3 payloads by the downlink; each other node sends one by the uplink
    assert group_traffic("gather", 4, "inter").time_us(1000.0, FAST, consumer) == pytest.approx(30.0 + 1.0)
    assert group_traffic("broadcast", 4, "inter", "direct").time_us(1000.0, FAST, consumer) == pytest.approx(30.0 + 3.0)


def test_two_nics_halve_the_time_of_a_node_and_not_that_of_one_flow():
    one, two = Link(0.0, 8.0), Link(0.0, 16.0, flow_gbps=8.0)
    for word in ("alltoall", "allgather", "reducescatter"):
        for traffic in (flat_traffic(word, 4, 1, "direct"), flat_traffic(word, 2, 2, "direct")):
            assert traffic.time_us(1000.0, FAST, two) == traffic.time_us(1000.0, FAST, one) / 2
    ring = flat_traffic("allreduce", 4, 2)  # one flow from node to node
    assert ring.time_us(1000.0, FAST, two) == ring.time_us(1000.0, FAST, one)
    several = group_traffic("allreduce", 4, "inter", flows=2)  # a ring for each rank of a node
    assert several.time_us(1000.0, FAST, two) == several.time_us(1000.0, FAST, one) / 2


def test_two_nodes_of_one_rank_have_a_single_flow():
    two = Link(0.0, 16.0, flow_gbps=8.0)
    traffic = flat_traffic("alltoall", 2, 1, "direct")
    assert traffic.time_us(1000.0, FAST, two) == traffic.time_us(1000.0, FAST, GBPS)


def priced_us(cluster: Cluster, option: tuple[str, ...]) -> list[float]:
    bucket = Bucket(tensors=("w",), spec=Identity(), option=option)
    prices = Prices([TensorInfo("w", (1000,), "float32")], cluster, Costs(codecs=()), "direct")
    return [price.us for price in prices.of(bucket).tasks]


def test_prices_take_the_slowest_node_and_all_reduce_its_own_link():
    cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=GBPS, slow_nodes=[Link(0.0, 2.0)])
    assert priced_us(cluster, ("allreduce:inter",)) == pytest.approx([6000 * 8 / 2000])
    # measured with the slow node among all
    measured = msgspec.structs.replace(cluster, allreduce=Link(0.0, 1.0))
    assert priced_us(measured, ("allreduce:inter",)) == pytest.approx([6000 * 8 / 1000])
    assert priced_us(measured, ("reducescatter:inter", "allgather:inter")) == pytest.approx([3000 * 8 / 2000] * 2)
    everywhere = msgspec.structs.replace(cluster, slow_nodes=[GBPS.scaled(2.0)] * 4)
    assert priced_us(everywhere, ("allreduce:inter",)) == pytest.approx([6000 * 8 / 16_000])


def uneven_job(**changes: object) -> PlanningJob:
    same = job(Link(10.0, 40.0))
    cluster = msgspec.structs.replace(same.cluster, **changes)
    return PlanningJob(same.profile, cluster, same.simulator.prices.costs, same.specs)


@pytest.mark.parametrize(
    "changes",
    [
        {"inter": Link(30.0, 25.0, up_gbps=3.0)},
        {"inter": Link(30.0, 25.0, flow_gbps=2.0)},
        {"slow_nodes": [Link(200.0, 4.0, up_gbps=1.0)]},
    ],
)
def test_plans_know_of_uneven_links(changes: dict[str, object]):
    """No plan is faster there, the bound is below all plans, and joint is the best of all methods."""
    even, uneven = uneven_job(), uneven_job(**changes)
    best = uneven.step(joint(uneven))
    assert best is not None
    for method in METHODS:
        draft = make_plan(even, method).draft
        before, behind, own = even.step(draft), uneven.step(draft), uneven.step(make_plan(uneven, method).draft)
        assert before is not None and behind is not None and behind >= before
        assert own is not None and best <= own and own / FS_PER_US >= uneven.lower_bound_us()
    moved = uneven.step(joint(even))
    assert moved is not None and best <= moved
    assert uneven.lower_bound_us() >= even.lower_bound_us()


def test_files_of_older_releases_load_and_files_without_uneven_links_look_like_them():
    text = (
        '{"version": 1, "nodes": 2, "ranks_per_node": 1, "intra": {"alpha_us": 1.0, "gbps": 10.0}, '
        '"inter": {"alpha_us": 5.0, "gbps": 1.0}}\n'
    )
    old = Cluster.from_json(text)
    assert (old.inter.up_gbps, old.inter.flow_gbps, old.slow_nodes) == (None, None, ())
    assert old.to_json(indent=None) == text


def test_uneven_links_round_trip():
    consumer = Link(30.0, 1.0, up_gbps=0.1, flow_gbps=0.05)
    cluster = Cluster(nodes=3, ranks_per_node=2, intra=FAST, inter=consumer, slow_nodes=[consumer, GBPS])
    assert Cluster.from_json(cluster.to_json()) == cluster
    data = json.loads(cluster.to_json())
    assert data["inter"] == {"alpha_us": 30.0, "gbps": 1.0, "up_gbps": 0.1, "flow_gbps": 0.05}
    assert data["slow_nodes"] == [data["inter"], {"alpha_us": 0.0, "gbps": 8.0}]
    assert {hash(cluster), hash(Cluster.from_json(cluster.to_json()))} == {hash(cluster)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"slow_nodes": [GBPS] * 3}, "slow_nodes has 3 links, but nodes is 2"),
        ({"slow_nodes": [2.0]}, r"slow_nodes\[0\] is 2.0"),
        ({"slow_nodes": GBPS}, "slow_nodes is Link"),
        ({"intra": Link(0.0, 8.0, up_gbps=1.0)}, r"intra.up_gbps of 2 nodes is 1.0.*Leave out up_gbps"),
        ({"intra": Link(0.0, 8.0, flow_gbps=1.0)}, r"intra.flow_gbps of 2 nodes is 1.0.*intra.gbps"),
        ({"nodes": 1, "allreduce": Link(0.0, 8.0, up_gbps=1.0)}, "allreduce.up_gbps of 1 nodes is 1.0"),
    ],
)
def test_refused_clusters(changes: dict[str, object], told: str):
    fields = {"nodes": 2, "ranks_per_node": 2, "intra": GBPS, "inter": GBPS} | changes
    with pytest.raises(FormatError, match=told):
        Cluster(**fields)


def test_a_rate_in_another_unit_names_the_field():
    data = {"version": 1, "nodes": 2, "ranks_per_node": 1, "intra": {"alpha_us": 1, "gbps": 10}}
    with pytest.raises(FormatError, match=r"Rates are gigabits per second: up_gbps"):
        Cluster.from_dict(data | {"inter": {"alpha_us": 1, "gbps": 1, "up_mbps": 100}})


def test_auto_prices_messages_on_the_slowest_node():
    plan = Plan(
        fingerprint="f",
        buckets=[Bucket(tensors=("w",), spec=Identity(), option=("allreduce:inter",))],
        launch=[(0, "allreduce")],
    )
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=FAST, inter=Link(10.0, 8.0))
    assert wire_us(cluster, plan, [1000]) == pytest.approx(11.0)
    slow = msgspec.structs.replace(cluster, slow_nodes=[Link(5.0, 8.0, up_gbps=0.8)])
    assert wire_us(slow, plan, [1000]) == pytest.approx(15.0)
    alone = Cluster(nodes=1, ranks_per_node=2, intra=Link(10.0, 8.0), inter=FAST)
    assert wire_us(alone, plan, [1000]) == pytest.approx(11.0)


def test_sweeps_keep_directions_slow_nodes_and_processor_times():
    inter, slow = Link(30.0, 10.0, up_gbps=2.0, flow_gbps=5.0), Link(90.0, 1.0)
    own = Link(40.0, 5.0, cpu_us=7.0)
    cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=inter, allreduce=own, slow_nodes=[slow, inter])
    (same,), (faster,) = clusters(cluster, [10.0], [4]), clusters(cluster, [20.0], [1])
    assert same == cluster
    assert faster.inter == Link(30.0, 20.0, up_gbps=4.0, flow_gbps=5.0)
    assert (faster.slow_nodes, faster.allreduce) == ((Link(90.0, 2.0),), None)
    given = job(Link(10.0, 40.0))
    measured = msgspec.structs.replace(given.cluster, allreduce=own, launch_us=100.0)
    expected = make_plan(PlanningJob(given.profile, measured, given.simulator.prices.costs), "ddp").plan.prediction
    (row,) = sweep_methods(given.profile, clusters(measured, [25.0], None), given.simulator.prices.costs, methods=["ddp"])
    assert expected is not None and row.step_us == expected.step_us


class TestSlowNode:
    def test_any_of_nodes_alike_may_be_the_slow_one(self):
        cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=Link(3.0, 8.0, up_gbps=2.0, flow_gbps=1.0))
        (case,) = slow_cases(cluster, 4.0)
        assert case.chance == 1
        assert case.cluster.slow_nodes == (Link(3.0, 2.0, up_gbps=0.5, flow_gbps=1.0),)
        assert msgspec.structs.replace(case.cluster, slow_nodes=()) == cluster

    def test_nodes_that_differ_are_tried_apart(self):
        slow = Link(0.0, 2.0)
        cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=GBPS, slow_nodes=[slow, slow])
        cases = {case.cluster.slow_nodes: case.chance for case in slow_cases(cluster, 2.0)}
        assert sum(cases.values()) == 1
        assert cases[slow, slow, Link(0.0, 4.0)] == 0.5
        everywhere = Cluster(nodes=2, ranks_per_node=1, intra=FAST, inter=GBPS, slow_nodes=[slow, GBPS])
        assert [case.chance for case in slow_cases(everywhere, 2.0)] == [0.5, 0.5]

    def test_measured_all_reduce_falls_with_the_slowest_node(self):
        cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=GBPS, allreduce=Link(9.0, 6.0, cpu_us=1.0))
        (case,) = slow_cases(cluster, 4.0)
        assert case.cluster.allreduce == Link(9.0, 1.5, cpu_us=1.0)
        # the slowest stays the slowest
        with_slow = msgspec.structs.replace(cluster, slow_nodes=[Link(0.0, 2.0)])
        own = {case.cluster.slow_nodes: case.cluster.allreduce.gbps for case in slow_cases(with_slow, 2.0)}
        assert own == {(Link(0.0, 2.0), Link(0.0, 4.0)): 6.0, (Link(0.0, 1.0),): 3.0}

    def test_one_node_has_no_slow_link(self):
        with pytest.raises(PlanError, match=r"nodes is 1.*several nodes"):
            slow_cases(Cluster(nodes=1, ranks_per_node=4, intra=FAST, inter=GBPS), 2.0)

    def test_mean_and_worst_of_a_known_plan(self):
        """4 MB of all-reduce among 4 nodes after 100 us of backward, at 8, 4 and 0.8 Gb/s."""
        given = job(Link(10.0, 40.0))
        (tensor,) = [msgspec.structs.replace(t, shape=(1000, 1000), backward_us=100.0) for t in given.profile.tensors[:1]]
        profile = msgspec.structs.replace(given.profile, tensors=(tensor,))
        cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=GBPS)
        plans = plans_for_slow_node(profile, cluster, Costs(codecs=()), [])
        answer = steps_with_slow_node(plans, profile, cluster, Costs(codecs=()), [1.0, 2.0, 10.0])
        (row,) = answer.rows
        assert row.name == "plain DDP"
        assert row.steps_us == pytest.approx((6100.0, 12_100.0, 60_100.0))
        assert (row.mean_us, row.worst_us) == pytest.approx((26_100.0, 60_100.0))

    def test_the_mean_is_over_nodes_too(self):
        given = job(Link(10.0, 40.0))
        (tensor,) = [msgspec.structs.replace(t, shape=(1000, 1000), backward_us=100.0) for t in given.profile.tensors[:1]]
        profile = msgspec.structs.replace(given.profile, tensors=(tensor,))
        cluster = Cluster(nodes=4, ranks_per_node=1, intra=FAST, inter=GBPS, slow_nodes=[Link(0.0, 4.0)])
        plans = plans_for_slow_node(profile, cluster, Costs(codecs=()), [])
        (row,) = steps_with_slow_node(plans, profile, cluster, Costs(codecs=()), [2.0]).rows
        # 3 of 4 nodes become as slow as the slow one; the slow one becomes twice as slow
        assert row.steps_us == pytest.approx((0.75 * 12_100.0 + 0.25 * 24_100.0,))
        assert row.worst_us == pytest.approx(24_100.0)

    def test_plans_for_a_slow_node(self):
        """On a quick link nothing is compressed; a slow node changes that, and the answer has the least mean of all."""
        given = uneven_job(inter=Link(5.0, 400.0))
        slower = [1.0, 200.0]
        arguments = (given.profile, given.cluster, given.simulator.prices.costs, slower)
        plans = plans_for_slow_node(*arguments, given.specs)
        answer = steps_with_slow_node(plans, *arguments)
        assert list(plans) == ["plain DDP", "planned for 1", "planned for 200"]
        as_it_is, robust = (next(r for r in answer.rows if r.name == f"planned for {x}") for x in (1, 200))
        assert as_it_is.steps_us[0] <= robust.steps_us[0]
        assert robust.steps_us[1] < as_it_is.steps_us[1]
        assert answer.best == min(answer.rows, key=lambda row: row.mean_us)
        # predictions are of the cluster as it is
        for name, row in zip(plans, answer.rows, strict=True):
            assert plans[name].prediction.step_us == pytest.approx(row.steps_us[0])
