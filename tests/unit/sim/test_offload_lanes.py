"""Lanes for buckets with codecs on CPUs: a slow codec there keeps no other bucket from being launched."""

import pytest
from small_steps import TWO_PHASE, cluster, plan_of, profile

from gradwire.core import Cast, CodecCosts, Costs
from gradwire.core.launch import codes_on_cpu, lanes_of_pieces, launch_tasks, tasks_by_lane
from gradwire.errors import PlanError
from gradwire.planner.offload import on_cpu
from gradwire.sim.rules import Rules
from gradwire.sim.simulator import Simulator
from gradwire.sim.timeline import simulate

GATHERED = ("comp:gpu", "allgather:inter", "decomp:gpu")
SLOW_CPU = Costs(
    codecs=[
        CodecCosts(spec=Cast(), device=device, encode=[(4, us)], decode=[(4, 1.0)])
        for device, us in (("gpu", 5.0), ("cpu", 1000.0))
    ]
)


def test_pieces_go_round_the_lanes_of_their_kind():
    order = launch_tasks([(bucket, "allgather") for bucket in range(5)], [1, 2, 1, 1, 1], skew=False)
    found = lanes_of_pieces(order, lanes=2, offloaded=[1, 3], offload_lanes=2)
    assert found == {(0, 0): 0, (1, 0): 2, (1, 1): 3, (2, 0): 1, (3, 0): 2, (4, 0): 0}
    assert tasks_by_lane(order, 2, [1, 3], 2)[2] == [(1, 0, 0), (3, 0, 0)]
    # without lanes of their own all go round the same ones
    assert set(lanes_of_pieces(order, 2, offloaded=[1, 3]).values()) == {0, 1}


def test_a_codec_on_a_cpu_is_told_from_a_launch():
    assert codes_on_cpu(on_cpu(TWO_PHASE)) and codes_on_cpu(["allgather:inter", "decomp:cpu"])
    assert not codes_on_cpu(TWO_PHASE) and not codes_on_cpu(["launch:cpu", "allreduce:inter"])


@pytest.mark.parametrize(("offload_lanes", "waits"), [(0, True), (1, False)])
def test_a_slow_codec_on_a_cpu_blocks_no_other_bucket(offload_lanes, waits):
    model = profile((40, 1.0), (40, 1.0))
    plan = plan_of(model, [on_cpu(GATHERED), GATHERED], Cast())
    rules = Rules(lanes=1, offload_lanes=offload_lanes)
    timeline = simulate(plan, model, cluster(), SLOW_CPU, rules)
    sent = [event.start_us for event in timeline.events if event.what == "allgather" and event.bucket == 1]
    assert (sent[0] > 1000.0) == waits


def test_lanes_take_the_pieces_that_the_engines_take():
    model = profile((40, 1.0), (80, 1.0), (40, 1.0), (40, 1.0))
    plan = plan_of(model, [TWO_PHASE, on_cpu(TWO_PHASE), on_cpu(TWO_PHASE), TWO_PHASE], Cast(), chunk_bytes=40)
    rules = Rules(lanes=2, offload_lanes=1)
    layout = Simulator(model, cluster(), SLOW_CPU, rules).outcome(plan, record=False).layouts[0]
    ours = [[(x.bucket, x.chunk) for x in row if x.price.task.endswith("inter")] for row in layout.labels]
    offloaded = [index for index, bucket in enumerate(plan.buckets) if codes_on_cpu(bucket.option)]
    assert offloaded == [1, 2]
    engine = tasks_by_lane(launch_tasks(plan.launch, [1, 2, 1, 1], skew=False), 2, offloaded, 1)
    assert ours == [[(bucket, piece) for bucket, piece, _ in tasks] for tasks in engine]


def test_lanes_may_be_empty_in_all_steps():
    """Also where many steps are simulated."""
    model = profile((40, 1.0, 1.0), (40, 1.0, 1.0))
    plan = plan_of(model, [on_cpu(GATHERED)] * 2, Cast())
    one, more = (simulate(plan, model, cluster(), SLOW_CPU, Rules(lanes=lanes, offload_lanes=1)).step_us for lanes in (1, 5))
    assert one == more > 2000.0


@pytest.mark.parametrize("fields", [{"lanes": 0}, {"lanes": 2, "device": "cpu"}])
def test_lanes_for_offload_stand_beside_those_of_a_gpu(fields):
    with pytest.raises(PlanError, match="offload_lanes is 1"):
        Rules(offload_lanes=1, **fields)
    with pytest.raises(PlanError, match="offload_lanes is -1"):
        Rules(lanes=2, offload_lanes=-1)
