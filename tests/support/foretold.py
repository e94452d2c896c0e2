"""plan="auto" with made-up predictions and made-up links: what it tries and decides is then known."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gradwire as gw
from gradwire.auto.planning import Offer, offers
from gradwire.core.cluster import Cluster, Link


@contextmanager
def foretold(step_ms: Callable[[gw.Plan], float], link_ms: float = 1.0) -> Iterator[None]:
    """Plans are predicted to take so long, and links are measured so that a step's messages take `link_ms`."""

    def made(*arguments: Any, **named: Any) -> list[Offer]:
        found = [
            Offer(each.candidate._replace(predicted_us=1e3 * step_ms(each.plan)), each.plan)
            for each in offers(*arguments, **named)
        ]
        return sorted(found, key=lambda each: each.candidate.to_loss_us)

    def measured(live: Any, seconds: float) -> Cluster:
        link = Link(1e3 * link_ms, 10.0)
        return Cluster(nodes=live.grid.nodes, ranks_per_node=live.grid.ranks_per_node, intra=link, inter=link)

    def wire_us(cluster: Cluster, plan: gw.Plan, nbytes: list[int]) -> float:
        return cluster.inter.alpha_us

    with (
        mock.patch("gradwire.auto.driver.offers", made),
        mock.patch("gradwire.auto.driver.cluster_of", measured),
        mock.patch("gradwire.auto.change_watch.cluster_of", measured),
        mock.patch("gradwire.auto.change_watch.wire_us", wire_us),
    ):
        yield
