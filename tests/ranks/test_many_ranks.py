"""More ranks than connect with all others: few connections, plans that need more of them, and news of silent ranks."""

import math
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import digest

import gradwire as gw
from gradwire.core import AT_ONCE
from gradwire.exchange.plans import info_of, plan_for
from gradwire.transport import Group
from gradwire.transport.grid import Grid
from gradwire.transport.heartbeats import Heartbeats, SilenceNews
from gradwire.transport.keys import JobKey
from gradwire.transport.rounds import merge_peers, neighbours

NUMEL = 40_000


class LonelyGroup(Group):
    """The ranks that share a store, each on a node of its own."""

    @staticmethod
    def of_store(store: Any, rank: int, size: int, timeout: timedelta) -> "LonelyGroup":
        return LonelyGroup(None, rank, tuple(range(size)), timeout, Grid.even(1, size, rank), own_store=store)

    def machine_name(self) -> str:
        return f"node {self.rank}"


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def together(size: int, function: Callable[[Group], Any], kind: type[Group] = LonelyGroup) -> list[Any]:
    """What the function returns on each rank. Ranks are threads, with connections as between processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_of(rank: int) -> Any:
        own = dist.PrefixStore("ranks", dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        return function(kind.of_store(own, rank, size, timedelta(seconds=60)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def most(size: int) -> float:
    return 8 + 2 * math.log2(size)


PLANS = {
    "grid": gw.QSGD(bits=4),
    "uneven grid": gw.Policy(default=gw.QSGD(bits=4), scheme="grid", exempt_vectors=False),
    "ring": gw.Policy(default=gw.Cast("bfloat16"), scheme="ring", exempt_vectors=False),
    "tree": gw.Policy(default=gw.Cast("bfloat16"), scheme="tree", exempt_vectors=False),
    "exact": gw.Identity(),
}


def connections_of(plan: Any, group: Group) -> tuple[str, list[int]]:
    """A digest of the mean, and the connections of each mesh."""
    values = gradient(group.rank)
    exchange = gw.Exchange({"values": values}, plan, group)
    exchange.average_()
    exchange.average_({"values": values})
    lanes = exchange.lanes
    assert lanes._heartbeats is not None
    counts = [len(lanes._heartbeats._connections), len(lanes.control.link.backend._peers)]
    for lane in lanes.data:
        assert lane.link.wire is not None
        counts += [len(lane.link.backend._peers), len(lane.link.wire._sockets)]
    exchange.close()
    return digest([values]), counts


@pytest.mark.parametrize(("size", "scheme"), [(24, "grid"), (23, "uneven grid"), (20, "ring"), (18, "tree"), (18, "exact")])
def test_many_ranks_have_few_connections(many_descriptors: None, size: int, scheme: str) -> None:
    found = together(size, lambda group: connections_of(PLANS[scheme], group))
    assert len({means for means, _ in found}) == 1
    for _, counts in found:
        assert max(counts) <= most(size), counts


def test_a_plan_that_needs_more_connections_gets_them(many_descriptors: None) -> None:
    """From a ring to messages from every rank to every other one, and back."""
    size = AT_ONCE + 2

    def live(group: Group) -> tuple[int, int, str]:
        values = gradient(group.rank)
        ring, direct = (
            gw.Policy(default=gw.Cast("bfloat16"), scheme=each, exempt_vectors=False) for each in ("ring", "alltoall")
        )
        exchange = gw.Exchange({"values": values}, ring, group)
        exchange.average_()
        before = wire_connections(exchange)
        for policy in (direct, ring):
            exchange.change_to(plan_for(policy, [info_of("values", values)], size, 1)[0])
            exchange.average_()
        after = wire_connections(exchange)
        exchange.close()
        return before, after, digest([values])

    found = together(size, live)
    assert {(before, after) for before, after, _ in found} == {(2, size - 1)}
    assert len({means for *_, means in found}) == 1


@pytest.mark.parametrize("plan", [gw.QSGD(bits=4), gw.Identity()], ids=repr)
def test_ranks_that_share_memory_have_few_connections_too(many_descriptors: None, plan: Any) -> None:
    size = AT_ONCE + 2

    def live(group: Group) -> tuple[str, int, int]:
        values = gradient(group.rank)
        exchange = gw.Exchange({"values": values}, plan, group)
        shares = min(len(lane.link.wire.shared_with) for lane in exchange.lanes.data if lane.link.wire is not None)
        exchange.average_()
        connections = wire_connections(exchange)
        exchange.close()
        return digest([values]), connections, shares

    found = together(size, live, Group)
    assert len({means for means, *_ in found}) == 1 and {shares for *_, shares in found} == {size - 1}
    assert max(connections for _, connections, _ in found) <= most(size)


def wire_connections(exchange: gw.Exchange) -> int:
    return max(len(lane.link.wire._sockets) for lane in exchange.lanes.data if lane.link.wire is not None)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 33, 48, 64, 100, 257, 1024])
def test_few_neighbours_reach_all_when_some_are_gone(size: int) -> None:
    of = [neighbours(rank, size) for rank in range(size)]
    for rank in range(size):
        assert rank not in of[rank] and all(rank in of[other] for other in of[rank])
        assert len(of[rank]) <= most(size)
        assert {other for other in range(size) if rank in merge_peers(other, size)} == merge_peers(rank, size)
    gone = set(range(3, min(8, size - 1)))  # as many as a machine has
    reached, hops = {0}, 0
    while len(reached) + len(gone) < size and hops < size:
        reached |= {other for rank in reached for other in of[rank]} - gone
        hops += 1
    assert hops <= 2 + math.log2(max(2, size))


# ---- heartbeats


class Silences:
    """Counts how often a silence was reported."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def test_news_of_a_silent_rank_reach_who_has_no_connection_to_it() -> None:
    """A chain of ranks 1 - 2 - 3. Somebody who knows the key sends rank 1 the news that rank 7 is silent."""
    news, ends = SilenceNews(JobKey(bytes(32)), "meeting"), [tcp_pair() for _ in range(3)]
    outside, seen = ends[0][0], [Silences() for _ in range(3)]
    links = [{0: ends[0][1], 2: ends[1][0]}, {1: ends[1][1], 3: ends[2][0]}, {2: ends[2][1]}]
    made = [Heartbeats(each, f"beats {at}", seen[at].add, 10.0, news) for at, each in enumerate(links)]
    outside.send(news.of(7)[:5])
    outside.send(news.of(7)[5:] + news.of(7))
    until = time.monotonic() + 20
    while not all(each.count for each in seen) and time.monotonic() < until:
        time.sleep(0.01)
    assert [each.silent() for each in made] == [[7]] * 3
    outside.send(bytes(news.size))  # no proof
    while not made[0].gone() and time.monotonic() < until:
        time.sleep(0.01)
    assert made[0].gone() == [0] and made[0].silent() == [7]
    made[2].stop()
    while not made[1].gone() and time.monotonic() < until:
        time.sleep(0.01)
    assert made[1].gone() == [3] and made[1].silent() == [7]
    assert [each.count for each in seen] == [1, 1, 1]
    for each in made[:2]:
        each.stop()
    outside.close()
