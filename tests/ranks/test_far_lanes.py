"""Ranks that are far apart exchange more pieces at a time, all of them as many, with the same bits."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.core import Cluster, Link
from gradwire.sim import rules_of
from gradwire.sim.rules import as_ddp
from gradwire.transport import rendezvous


def train(round_trips_us: list[float]) -> tuple[str, int, int]:
    """A few steps: a digest of the weights, and how many lanes and wires there are."""
    torch.manual_seed(0)
    model = Given([300_000, 200_000, 7, 400_000, 300_000, 250_000])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(rendezvous, "tune", lambda connection: round_trips_us[dist.get_rank()]):
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(bits=4), bucket_bytes=800_000, edge_bytes=800_000))
    assert len(handle.plan.buckets) > 4, len(handle.plan.buckets)
    for step in range(3):
        model(model.random_gradients(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    lanes = handle.session.lanes.data
    found = digest(model.parameters()), len(lanes), sum(lane.link.wire is not None for lane in lanes)
    handle.detach()
    return found


def short(round_trips_us: list[float]) -> str:
    """What a rank says that has no descriptors for four lanes, where another one sees the long way."""
    model, rank = Given([3_000]), dist.get_rank()
    meets = rendezvous.Rendezvous.why_too_few

    def why_too_few(self: rendezvous.Rendezvous, meshes: list[str]) -> str:
        return "few are left" if rank == 0 and "wire 3" in meshes else meets(self, meshes)

    tune = mock.patch.object(rendezvous, "tune", lambda connection: round_trips_us[rank])
    with tune, mock.patch.object(rendezvous.Rendezvous, "why_too_few", why_too_few):
        try:
            gw.parallelize(model, plan=gw.QSGD(bits=4))
        except gw.DisagreementError as error:
            return str(error)
    return ""


def test_ranks_without_descriptors_for_more_lanes_are_named_by_all(worlds: Worlds) -> None:
    said = worlds.run(2, short, [100.0, 50_000.0])
    assert all("rank 0: few are left" in words for words in said)


@pytest.mark.parametrize("size", [2, 3])
def test_one_long_way_gives_all_ranks_more_lanes(worlds: Worlds, size: int) -> None:
    near = worlds.run(size, train, [3_900.0] * size)
    far = worlds.run(size, train, [100.0, 50_000.0, 100.0][:size])
    assert {(lanes, wires) for _, lanes, wires in near} == {(2, 2)}
    assert {(lanes, wires) for _, lanes, wires in far} == {(4, 4)}
    assert len({weights for weights, *_ in (*near, *far)}) == 1


def test_the_simulator_has_as_many_lanes_as_the_engine() -> None:
    inside, near, far = Link(5.0, 100.0), Link(1_000.0, 0.1, message_us=40.0), Link(25_000.0, 0.1, message_us=40.0)
    shape = {"nodes": 2, "ranks_per_node": 1, "intra": inside}
    assert rules_of("cpu", Cluster(**shape, inter=near)).lanes == 2
    assert rules_of("cpu", Cluster(**shape, inter=Link(25_000.0, 0.1))).lanes == 4, "all of its time is latency"
    for there in (Cluster(**shape, inter=far, ddp=far), Cluster(**shape, inter=far)):
        rules = rules_of("cpu", there)
        assert rules.lanes == 4 and rules_of("gpu", there).lanes == 0
        assert as_ddp(there, rules)[1].lanes == 2
