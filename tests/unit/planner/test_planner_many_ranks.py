"""Plans for many ranks: messages that do not shrink, and options that cost too much for so many."""

from collections import Counter

import pytest

from benchmarks.growth_simulated import bert_large
from gradwire.core import (
    COLLECTIVES,
    QSGD,
    Cluster,
    CodecCosts,
    Costs,
    Identity,
    Link,
    PowerSGD,
    Spec,
    TopK,
)
from gradwire.plan import Policy
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.starts import ddp_draft

BITS = QSGD(bits=4)
TWO_PHASES, GRID = (COLLECTIVES[name].on("gpu") for name in ("alltoall", "grid"))


def job(nodes: int, ranks_per_node: int = 1, limits: Limits | None = None) -> PlanningJob:
    """25 Gb/s and 30 us between nodes, codecs of 100 GB/s."""
    cluster = Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=Link(5.0, 400.0), inter=Link(30.0, 25.0))
    times = [(1024, 15.0), (2**26, 15.0 + 1e-5 * 2**26)]
    costs = Costs(codecs=[CodecCosts(spec=BITS, device="gpu", encode=times, decode=times)])
    return PlanningJob(bert_large(), cluster, costs, [BITS], limits)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(64, 1), (512, 1), (1024, 1), (64, 8)])
def test_a_fixed_spec_is_near_the_joint_plan(nodes: int, ranks_per_node: int) -> None:
    """Buckets and chunks of 8 MiB sent directly took 8 s at 512 nodes, where all-reduce takes 2.5 s."""
    planning = job(nodes, ranks_per_node)
    fixed = Policy(default=BITS).plan(bert_large().tensor_infos("gpu"), nodes * ranks_per_node, ranks_per_node)
    fixed_us = planning.simulator.step_us(fixed)
    assert fixed_us <= 1.2 * planning.simulator.step_us(planning.light(joint(planning)))
    assert fixed_us < planning.simulator.step_us(planning.light(ddp_draft(planning)))


def test_with_many_ranks_the_search_takes_the_grid() -> None:
    """Single buckets may go directly, where other links are free meanwhile."""
    planning, tensors = job(512), Counter[tuple[str, ...]]()
    for part in joint(planning).parts:
        tensors[part.choice.option] += len(part.tensors)
    assert tensors[GRID] > tensors.total() / 2


@pytest.mark.parametrize(("nodes", "kept"), [(4, True), (512, False)])
def test_all_gather_leaves_the_candidates_where_its_payloads_cost_more(nodes: int, kept: bool) -> None:
    options = {choice.option for choice in job(nodes).choices(1000)}
    assert (COLLECTIVES["allgather"].on("gpu") in options) == kept and GRID in options


@pytest.mark.parametrize(
    ("nodes", "most", "names"),
    [
        (4, None, {"grid", "ring", "tree"}),
        (8, None, {"grid", "tree"}),
        (64, None, {"grid"}),
        (64, 2, set()),
        (64, 7, {"grid", "tree"}),
        (64, 64, {"grid", "ring", "tree"}),
    ],
)
def test_options_beside_the_tree_encode_an_element_seldom(nodes: int, most: int | None, names: set[str]) -> None:
    found = job(nodes, limits=Limits(max_encodes=most)).beside[BITS]
    assert set(found) == {COLLECTIVES[name].on("gpu") for name in names}


def test_searches_within_a_part_of_the_tree_do_not_have_them() -> None:
    restricted = job(8, 2, Limits(restrict="inter-alltoall"))
    assert restricted.beside[BITS] == [] and not set(job(4).coded[BITS]) & set(job(4).beside[BITS])


def test_no_plan_is_shorter_than_the_bound() -> None:
    planning = job(64)
    assert planning.lower_bound_us() <= planning.simulator.step_us(planning.light(joint(planning)))


@pytest.mark.parametrize(
    ("ranks", "per_node", "spec", "scheme"),
    [
        (16, 1, BITS, TWO_PHASES),
        (17, 1, BITS, TWO_PHASES),  # prime: no even grid
        (127, 1, BITS, TWO_PHASES),
        (131, 1, BITS, GRID),
        (18, 1, BITS, GRID),
        (64, 64, BITS, GRID),
        (64, 1, TopK(0.01), COLLECTIVES["allgather"].on("gpu")),
        (64, 1, PowerSGD(rank=4), COLLECTIVES["allreduce"].on("gpu", 2)),
        (64, 1, Identity(), ("allreduce:inter",)),
    ],
)
def test_the_default_scheme_of_many_ranks(ranks: int, per_node: int, spec: Spec, scheme: tuple[str, ...]) -> None:
    infos = bert_large().tensor_infos("gpu")
    plan = Policy(default=spec, exempt_vectors=False).plan(infos, ranks, per_node)
    assert {bucket.option for bucket in plan.buckets} == {scheme}


def test_a_scheme_by_name_is_kept() -> None:
    plan = Policy(default=BITS, scheme="flat").plan(bert_large().tensor_infos("gpu"), 64)
    assert {bucket.option for bucket in plan.buckets} == {TWO_PHASES}


@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 1024])
def test_buckets_and_chunks_grow_with_ranks(ranks: int) -> None:
    tensors = bert_large().tensor_infos("gpu")
    total = sum(tensor.nbytes for tensor in tensors)
    plan = Policy(default=BITS, scheme="flat").plan(tensors, ranks)
    nbytes = {tensor.name: tensor.nbytes for tensor in tensors}
    full = max(32 * 2**20, min(ranks * 2**20, max(8 * 2**20, total // 8)))
    largest_tensor = max(nbytes.values())
    sizes = [sum(nbytes[name] for name in bucket.tensors) for bucket in plan.buckets]
    assert full <= max(sizes) < full + largest_tensor
    assert {bucket.chunk_bytes for bucket in plan.buckets} <= {0, max(full, 48 * 2**20)}


def test_buckets_of_a_small_model_do_not_grow() -> None:
    tensors = bert_large().tensor_infos("cpu")[:20]
    assert Policy(default=BITS).plan(tensors, 1024) == Policy(default=BITS, scheme="grid").plan(tensors, 8)
