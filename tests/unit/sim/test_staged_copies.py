"""Payloads of a GPU that travel through the host's memory: their copies have a price, and run while other pieces are sent."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from gradwire.core import QSGD, Backward, Cluster, CodecCosts, Costs, Identity, Link, Profile, TensorProfile
from gradwire.plan import Uniform
from gradwire.sim import Timeline, simulate
from gradwire.sim.rules import rules_of

SPEC = QSGD(bits=4)
LAYERS, NUMEL = 42, 8_000_000
"""Together as many elements as BERT-large has."""
PCIE_5_GBPS = 400.0


def timeline(staging_gbps: float | None, spec: Any = SPEC, scheme: str = "alltoall", chunk_bytes: int = 0) -> Timeline:
    """A step of a model as large as BERT-large on 8 nodes at 25 Gb/s."""
    tensors = [TensorProfile(name=f"t{n}", shape=(NUMEL,), dtype="float32", backward_us=100.0) for n in range(LAYERS)]
    profile = Profile(model="m", batch=1, device="gpu", tensors=tensors)
    shape = Cluster(nodes=8, ranks_per_node=1, intra=Link(0.0, 400.0), inter=Link(0.0, 25.0), staging_gbps=staging_gbps)
    costs = Costs(codecs=[CodecCosts(spec=SPEC, device="gpu", encode=[(0, 0.0)], decode=[(0, 0.0)])])
    policy = Uniform(spec, bucket_bytes=2**25, chunk_bytes=chunk_bytes, schedule=Backward(), scheme=scheme)
    plan = policy.plan(profile.tensor_infos("gpu"), 8)
    return simulate(plan, profile, shape, costs, rules_of("gpu"))


def ms_of(found: Timeline) -> Counter[str]:
    """The milliseconds of each task."""
    ms: Counter[str] = Counter()
    for event in found.events:
        ms[event.what] += (event.end_us - event.start_us) / 1e3  # type: ignore[assignment]
    return ms


def test_the_copies_of_bert_large_take_little_beside_the_wire() -> None:
    ms = ms_of(timeline(PCIE_5_GBPS))
    assert ms["alltoall"] + ms["allgather"] == pytest.approx(97, abs=1)
    assert ms["fetch"] == pytest.approx(3.5, abs=0.1)  # each payload once
    assert ms["put"] == pytest.approx(6.1, abs=0.1)  # what comes from seven ranks, in both phases


def test_copies_run_while_other_buckets_are_sent() -> None:
    without, staged = timeline(None), timeline(PCIE_5_GBPS)
    assert "fetch" not in ms_of(without)
    copies_ms = ms_of(staged)["fetch"] + ms_of(staged)["put"]
    assert 0 < staged.step_us - without.step_us < 0.5e3 * copies_ms
    assert staged.sent_bytes == without.sent_bytes and staged.inter_bytes == without.inter_bytes


def test_slower_copies_take_longer() -> None:
    fast, slow = ms_of(timeline(400.0)), ms_of(timeline(100.0))
    assert slow["fetch"] == pytest.approx(4 * fast["fetch"]) and slow["put"] == pytest.approx(4 * fast["put"])
    assert slow["alltoall"] == pytest.approx(fast["alltoall"])


def test_a_sum_on_the_wire_is_copied_whole_each_way() -> None:
    ms = ms_of(timeline(400.0, Identity(), "allreduce"))
    whole_ms = LAYERS * NUMEL * 4 / 50e6
    assert ms["fetch"] == pytest.approx(whole_ms) and ms["put"] == pytest.approx(whole_ms)


def test_a_cluster_keeps_the_rate_of_copies() -> None:
    shape = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 1.0), inter=Link(1.0, 1.0))
    assert "staging" not in shape.to_json()
    staged = msgspec.structs.replace(shape, staging_gbps=200.0)
    assert Cluster.from_json(staged.to_json()) == staged
