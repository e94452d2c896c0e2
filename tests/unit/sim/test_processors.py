"""Ranks that share processors: codecs and launches take longer, computation was measured so."""

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
    Identity,
    Link,
    Plan,
    Profile,
    TensorProfile,
    fingerprint,
)
from gradwire.errors import FormatError
from gradwire.plan import launch_of
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import joint
from gradwire.sim import Simulator, simulate
from gradwire.sim.rules import rules_of

SPEC = QSGD(bits=4)
FAST = Link(0.0, 1e6)
TWO_PHASES = COLLECTIVES["alltoall"].on("cpu")


def profile(device: str) -> Profile:
    tensors = [TensorProfile(name=name, shape=(1000, 100), dtype="float32", backward_us=100.0, forward_us=0.0) for name in "ab"]
    return Profile(model="m", batch=1, device=device, tensors=tensors)


def costs(device: str) -> Costs:
    return Costs(codecs=[CodecCosts(spec=SPEC, device=device, encode=[(0, 30.0)], decode=[(0, 20.0)])])


def cluster(processors: float | None, **fields: float) -> Cluster:
    return Cluster(nodes=1, ranks_per_node=4, intra=FAST, inter=FAST, processors=processors, **fields)


def plan(option: tuple[str, ...], spec: QSGD | Identity) -> Plan:
    buckets = tuple(Bucket(tensors=(name,), spec=spec, option=option) for name in "ab")
    infos = profile("cpu").tensor_infos("cpu")
    return Plan(fingerprint=fingerprint(infos), schedule=Backward(), buckets=buckets, launch=launch_of(buckets, Backward()))


def codec_us(shape: Cluster, device: str = "cpu") -> float:
    option = COLLECTIVES["alltoall"].on(device)
    timeline = simulate(plan(option, SPEC), profile(device), shape, costs(device), rules_of(device))
    return sum(event.end_us - event.start_us for event in timeline.events if event.what in ("comp", "decomp"))


def test_four_ranks_on_two_processors_encode_and_decode_twice_as_long() -> None:
    alone = codec_us(cluster(None))
    assert alone == pytest.approx(2 * (30 + 3 * 20 + 30 + 20))  # a call for the payload of each other rank
    assert codec_us(cluster(2)) == pytest.approx(2 * alone)
    assert codec_us(cluster(0.5)) == pytest.approx(8 * alone)
    assert codec_us(cluster(4)) == codec_us(cluster(16)) == alone


def test_codecs_of_a_gpu_are_not_shared() -> None:
    assert codec_us(cluster(2), "gpu") == codec_us(cluster(None), "gpu") > 0


@pytest.mark.parametrize("measured", [None, Link(0.0, 1e6, cpu_us=7.0)])
def test_launches_take_longer_and_computation_does_not(measured: Link | None) -> None:
    found = []
    for processors in (None, 2):
        shape = msgspec.structs.replace(cluster(processors, launch_us=5.0), allreduce=measured)
        timeline = simulate(plan(ALL_REDUCE, Identity()), profile("cpu"), shape, costs("cpu"), rules_of("cpu"))
        lengths = {
            what: sum(event.end_us - event.start_us for event in timeline.events if event.what == what)
            for what in ("launch", "backward")
        }
        found.append(lengths)
    own_us = 5.0 if measured is None else 7.0
    assert found[0] == {"launch": pytest.approx(2 * own_us), "backward": pytest.approx(200)}
    assert found[1] == {"launch": pytest.approx(4 * own_us), "backward": pytest.approx(200)}


def test_a_step_is_no_shorter_than_the_work_of_all_ranks_on_the_processors() -> None:
    shape = cluster(2, launch_us=5.0)
    step_us = Simulator(profile("cpu"), shape, costs("cpu"), rules_of("cpu")).step_us(plan(TWO_PHASES, SPEC))
    codecs_us, launches_us, compute_us = 4 * 2 * 140.0, 4 * 4 * 5.0, 4 * 200.0 / 2  # backward was measured on 2 processors
    assert step_us >= (codecs_us + launches_us + compute_us) / 2


def test_the_planner_compresses_less_where_ranks_share_processors() -> None:
    """All-reduce takes 1.5 times the bytes at 8 Gb/s: 1.2 ms of both tensors."""
    compressed = []
    for processors in (None, 0.25):
        shape = msgspec.structs.replace(cluster(processors), intra=Link(1.0, 8.0))
        job = PlanningJob(profile("cpu"), shape, costs("cpu"), [SPEC])
        compressed.append(sum(part.choice.encodes for part in joint(job).parts))
        assert job.lower_bound_us() <= job.simulator.step_us(job.light(joint(job)))
    assert compressed[0] > 0 and compressed[1] == 0


def test_a_wrong_number_is_refused() -> None:
    with pytest.raises(FormatError, match="processors"):
        cluster(0)
    assert "processors" not in cluster(None).to_json() and Cluster.from_json(cluster(2).to_json()) == cluster(2)
