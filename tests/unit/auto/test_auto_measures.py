"""What auto measures and prices beside a trial: the budget of measurements, the price of a module's exchange. No ranks."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import gradwire as gw
from gradwire.auto import alone, change_watch
from gradwire.auto.adaptive_bits import AdaptiveBitsDriver
from gradwire.auto.bit_errors import columns
from gradwire.auto.change_watch import ChangeWatch
from gradwire.auto.changes import WINDOW
from gradwire.auto.driver import Auto
from gradwire.core import Cluster, Costs, Identity, Link, TensorInfo
from gradwire.plan import Uniform
from gradwire.transport import Grid, MergedValues

TENSOR = TensorInfo("w", (2048,), "float32")


def test_measurements_of_links_cost_what_they_took_on_the_slowest_rank() -> None:
    """A far or slow link takes several times as long as it was given, and the budget must see that."""
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, 1.0), inter=Link(50.0, 1.0))
    measured: list[int] = []
    live: Any = SimpleNamespace(step=9, plan=Uniform(Identity()).plan([TENSOR], 2), bytes_between_nodes=[8192.0])
    live.grid = Grid.even(2, 1, 0)
    live.exchange = lambda own: lambda: [own, [0.6e6, *own[1:]]]
    watch = ChangeWatch()
    watch.cluster, watch._compute_us = cluster, 1e5

    def cluster_of(*_: object) -> Cluster:
        measured.append(1)
        return cluster

    with mock.patch.object(change_watch, "cluster_of", cluster_of):
        for _ in range(5):
            assert watch._of_links(live, 1e5) is None
    assert len(measured) == 2, "0.6 s each of a budget of a second"


@pytest.mark.parametrize(("nodes", "ranks_per_node", "noticed"), [(2, 4, True), (8, 1, False), (1, 8, False)])
def test_ranks_of_a_node_send_over_one_link(nodes: int, ranks_per_node: int, noticed: bool) -> None:
    """Each of eight ranks sends 0.25 MB. At half the rate that takes 2 ms longer, in a step of 50; for four of a node 8 ms."""
    live: Any = SimpleNamespace(step=9, plan=Uniform(Identity()).plan([TENSOR], 2), bytes_between_nodes=[0.25e6])
    live.grid, live.exchange = Grid.even(nodes, ranks_per_node, 0), lambda own: lambda: [own] * 8
    watch = ChangeWatch()
    before, after = (
        Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=Link(50.0, gbps), inter=Link(50.0, gbps)) for gbps in (1.0, 0.5)
    )
    watch.cluster, watch._compute_us = before, 1e5
    with mock.patch.object(change_watch, "cluster_of", lambda *_: after):
        asked = watch._of_links(live, 5e4)
    assert (asked is not None) == noticed and (watch.cluster is after) == noticed


def test_what_rides_on_reports_does_not_grow_with_the_ranks() -> None:
    told = []
    live: Any = SimpleNamespace(step=3, link_us=20.0, exposed_us=10.0, inputs=32, group=SimpleNamespace(world_size=1024, rank=7))
    live.merge = lambda most, sums: told.append((most, sums)) or (lambda: None)
    watch = ChangeWatch()
    watch.begin(live, Uniform(Identity()).plan([TENSOR], 2), False, 100.0)
    assert (watch.compute_us, watch.inputs) == (0.0, 0.0)
    for us in (100.0, 130.0, 110.0, 120.0):
        watch.step(live, us)
    ((most, sums),) = told
    assert len(most) == 3 * WINDOW and list(sums) == [32] * WINDOW
    assert (watch.compute_us, watch.inputs) == (105.0, 32)


def test_speeds_are_asked_of_all_ranks_in_a_new_decision() -> None:
    driver, offered = Auto("safe", ("backward",), 2), []
    driver._profile, driver._speeds = mock.MagicMock(), (7.0, 7.0)
    driver._watch.compute_us, driver._watch.inputs = 100.0, 8.0
    live: Any = SimpleNamespace(exchange=lambda own: lambda: [own, [200.0, 8.0]])
    with (
        mock.patch("gradwire.auto.driver.scaled"),
        mock.patch.object(driver, "_offer", lambda *_: offered.append(driver._speeds)),
    ):
        driver._again(live, 1e3)
        driver._watch.compute_us = 0.0  # no window has ended
        driver._again(live, 1e3)
    assert offered == [(0.08, 0.04)] * 2


def test_errors_of_bits_are_added_up_on_the_way() -> None:
    adaptive, told = gw.AdaptiveBits(), list[list[float]]()
    driver, rows = AdaptiveBitsDriver(adaptive), {"w": [0.0] * columns(adaptive)}
    live: Any = SimpleNamespace(infos=[TENSOR], plan=SimpleNamespace(buckets=[]))
    live.merged = lambda most, sums: told.append([*sums]) or MergedValues(b"", (), tuple(sums))
    assert driver._errors_of_all_ranks(live, SimpleNamespace(rows=rows), {"w"}) == ([], [])  # type: ignore[arg-type]
    assert told == [rows["w"]]


def test_a_modules_exchange_is_priced_by_the_engines_rules() -> None:
    """Sums of few bytes between CPUs take 2 log2(n) messages, so 16 ranks pay twice what 4 do."""
    link = Link(80.0, 1.0)
    clusters = (Cluster(nodes=n, ranks_per_node=1, intra=link, inter=link) for n in (4, 16))
    (four,), (sixteen,) = (alone._us_of(TENSOR, [Identity()], None, each, Costs(codecs=()), "cpu") for each in clusters)
    assert 1.5 < sixteen / four < 2.2
