"""Ranks that are far apart exchange more pieces at a time, all of them as many, with the same bits."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.auto.live import Live
from gradwire.auto.measuring import cluster_of
from gradwire.core import Cluster, Link
from gradwire.profiler import links
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
    """What a rank says that has no descriptors for eight lanes, where another one sees the long way."""
    model, rank = Given([3_000]), dist.get_rank()
    meets = rendezvous.Rendezvous.why_too_few

    def why_too_few(self: rendezvous.Rendezvous, meshes: list[str]) -> str:
        return "few are left" if rank == 0 and "wire 7" in meshes else meets(self, meshes)

    tune = mock.patch.object(rendezvous, "tune", lambda connection: round_trips_us[rank])
    with tune, mock.patch.object(rendezvous.Rendezvous, "why_too_few", why_too_few):
        try:
            gw.parallelize(model, plan=gw.QSGD(bits=4))
        except gw.DisagreementError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("seen_by_first", [100.0, 5_000.0])
def test_ranks_without_descriptors_for_more_lanes_are_named_by_all(worlds: Worlds, seen_by_first: float) -> None:
    said = worlds.run(2, short, [seen_by_first, 50_000.0])
    assert all("rank 0: few are left" in words for words in said)


@pytest.mark.parametrize(
    ("round_trips_us", "lanes"),
    [
        ([3_900.0, 3_900.0, 3_900.0], 2),
        ([3_900.0, 4_100.0], 4),
        ([100.0, 50_000.0, 100.0], 8),
        ([50_000.0, 200_000.0], 16),
    ],
)
def test_the_longest_way_gives_all_ranks_more_lanes(worlds: Worlds, round_trips_us: list[float], lanes: int) -> None:
    size = len(round_trips_us)
    near, far = (worlds.run(size, train, each) for each in ([100.0] * size, round_trips_us))
    assert [(made, wires) for _, made, wires in far] == [(lanes, lanes)] * size
    assert len({weights for weights, *_ in (*near, *far)}) == 1


def probed(round_trip_us: float) -> dict[str, tuple[int, int]]:
    """By kind of measured traffic, how many lanes send parts of a large message, and the smallest part of the last lane."""
    model, used = Given([3_000]), dict[str, dict[int, int]]()
    with mock.patch.object(rendezvous, "tune", lambda connection: round_trip_us):
        handle = gw.parallelize(model, plan=gw.QSGD(bits=4))

    def watched(kind: type) -> Any:
        announce = kind.announce

        def announced(self: Any, nbytes: int, messages: int, at_once: int = 1) -> None:
            announce(self, nbytes, messages, at_once)
            used.setdefault(kind.__name__, {}).setdefault(id(self._link), nbytes)

        return mock.patch.object(kind, "announce", announced)

    with watched(links._Exchanges), watched(links._AllReduces):
        cluster_of(Live(handle.session), 0.2)
    handle.detach()
    return {name: (len(lanes), [*lanes.values()][-1]) for name, lanes in used.items()}


@pytest.mark.parametrize(("round_trip_us", "lanes", "least"), [(100.0, 1, 2**10), (50_000.0, 8, 2**16 // 8)])
def test_a_far_link_is_measured_on_all_lanes_that_share_it(worlds: Worlds, round_trip_us: float, lanes: int, least: int) -> None:
    """One connection alone sends at the rate that its congestion control learned beside the others. The second size of a far link
    is spread too: on one lane it takes so long that no larger one is measured."""
    assert worlds.run(2, probed, round_trip_us) == [dict.fromkeys(("_Exchanges", "_AllReduces"), (lanes, least))] * 2


@pytest.mark.parametrize(("alpha_us", "lanes"), [(1_000.0, 2), (10_000.0, 4), (25_000.0, 8), (100_000.0, 16)])
def test_the_simulator_has_as_many_lanes_as_the_engine(alpha_us: float, lanes: int) -> None:
    far, shape = Link(alpha_us, 0.1, message_us=40.0), {"ranks_per_node": 1, "intra": Link(5.0, 100.0)}
    assert rules_of("cpu", Cluster(nodes=2, **shape, inter=Link(alpha_us, 0.1))).lanes == lanes, "all of its time is latency"
    assert rules_of("cpu", Cluster(nodes=17, **shape, inter=far)).lanes == min(lanes, 8)
    for there in (Cluster(nodes=2, **shape, inter=far, ddp=far), Cluster(nodes=2, **shape, inter=far)):
        rules = rules_of("cpu", there)
        assert rules.lanes == lanes and rules_of("gpu", there).lanes == 0
        assert as_ddp(there, rules)[1].lanes == 2
