"""What auto measures and prices beside a trial: the budget of measurements, the price of a module's exchange. No ranks."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import gradwire as gw
from gradwire.auto import alone, change_watch
from gradwire.auto.adaptive_bits import AdaptiveBitsDriver
from gradwire.auto.bit_errors import columns
from gradwire.auto.change_watch import ChangeWatch
from gradwire.core import Cluster, Costs, Identity, Link, TensorInfo
from gradwire.plan import Uniform
from gradwire.transport import MergedValues

TENSOR = TensorInfo("w", (2048,), "float32")


def test_measurements_of_links_cost_what_they_took_on_the_slowest_rank() -> None:
    """A far or slow link takes several times as long as it was given, and the budget must see that."""
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, 1.0), inter=Link(50.0, 1.0))
    measured: list[int] = []
    live: Any = SimpleNamespace(step=9, plan=Uniform(Identity()).plan([TENSOR], 2), bytes_between_nodes=[8192.0])
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
