"""An intra link that all ranks of a node share, as GPUs behind one PCIe switch do."""

import json

import pytest

from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Link, Profile, TensorProfile
from gradwire.costs.collectives import flat_traffic, group_traffic
from gradwire.errors import FormatError
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import METHODS, make_plan
from gradwire.sim.simulator import FS_PER_US

OWN, SHARED = Link(0.0, 8.0), Link(0.0, 8.0, shared=True)
FAST = Link(0.0, 1e6)
WORDS = ("allreduce", "reducescatter", "alltoall", "allgather", "gather", "reduce", "broadcast")


def pairs(word: str, ranks: int) -> dict[tuple[int, int], float]:
    """What each rank sends directly to each other one, as a multiple of what it holds; rank 0 is the root."""
    to_all = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    if word in ("reducescatter", "alltoall"):
        return dict.fromkeys(to_all, 1 / ranks)
    if word == "allgather":
        return dict.fromkeys(to_all, 1.0)
    if word == "broadcast":
        return {(source, target): 1.0 for source, target in to_all if source == 0}
    return {(source, target): 1.0 for source, target in to_all if target == 0}


@pytest.mark.parametrize("word", [word for word in WORDS if word != "allreduce"])
@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (2, 2), (3, 4)])
def test_a_shared_link_carries_what_all_pairs_of_a_node_send(word: str, nodes: int, local: int):
    sent = sum(part for (a, b), part in pairs(word, nodes * local).items() if a < local and b < local)
    traffic = flat_traffic(word, nodes, local, "direct")
    assert traffic.intra_factor(SHARED) == pytest.approx(sent)
    assert traffic.intra_factor(OWN) == traffic.intra.factor <= sent + 1e-12


@pytest.mark.parametrize("word", WORDS)
def test_a_ring_inside_a_node_has_a_hop_from_each_rank(word: str):
    hops = {"gather": 4, "reduce": 4, "broadcast": 4}.get(word, 5)  # rooted ones along a chain
    alone = group_traffic(word, 5, "intra", "ring")
    each = {"gather": 1.0}.get(word, alone.intra.factor)  # the root's own link carries those of all
    assert alone.intra_factor(SHARED) == pytest.approx(hops * each)
    assert alone.time_us(1000.0, SHARED, FAST) == pytest.approx(hops * each * 1.0)


def test_a_ring_over_nodes_leaves_each_node_once():
    traffic = flat_traffic("allgather", 4, 8)
    assert traffic.intra_factor(SHARED) == 7 * traffic.intra.factor
    assert traffic.inter == flat_traffic("allgather", 4, 8).inter


def test_one_rank_a_node_shares_nothing():
    for word in WORDS:
        assert flat_traffic(word, 4, 1).intra_factor(SHARED) == 0.0


def job(intra: Link) -> PlanningJob:
    rows = [TensorProfile(name=f"t{i}", shape=(500, 1000), dtype="float32", backward_us=900.0) for i in range(6)]
    profile = Profile(model="made up", batch=1, device="V100", tensors=tuple(rows))
    costs = Costs(codecs=[CodecCosts(spec=QSGD(), device="gpu", encode=[(2**20, 60.0), (2**22, 90.0)], decode=[(2**20, 40.0)])])
    return PlanningJob(profile, Cluster(nodes=2, ranks_per_node=4, intra=intra, inter=Link(30.0, 25.0)), costs, [QSGD()])


def test_plans_know_of_the_switch():
    """No plan is faster behind a switch, and the bound is below all plans there too."""
    own, shared = job(Link(10.0, 40.0)), job(Link(10.0, 40.0, shared=True))
    for method in METHODS:
        draft = make_plan(own, method).draft
        step, behind = own.step(draft), shared.step(draft)
        assert step is not None and behind is not None and behind >= step
        best = shared.step(make_plan(shared, method).draft)
        assert best is not None and best / FS_PER_US >= shared.lower_bound_us()
    best, moved = shared.step(joint(shared)), shared.step(joint(own))
    assert best is not None and moved is not None and best <= moved
    assert shared.lower_bound_us() >= own.lower_bound_us()


def test_a_file_says_whether_a_link_is_shared():
    cluster = Cluster(nodes=2, ranks_per_node=4, intra=SHARED, inter=FAST)
    assert Cluster.from_json(cluster.to_json()) == cluster
    data = json.loads(cluster.to_json())
    assert data["intra"]["shared"] is True and "shared" not in data["inter"]
    data["intra"]["shared"] = "yes"
    with pytest.raises(FormatError, match="shared"):
        Cluster.from_json(json.dumps(data))
