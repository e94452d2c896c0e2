"""The machines of a site are one node for plans, where every rank names its site. Only ranks of a machine share memory."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from test_shared_memory import environment, shared_with
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.transport import rendezvous
from gradwire.transport.grid import SITE


@contextlib.contextmanager
def placed(sites: str, machines: str) -> Iterator[None]:
    """This rank is at the site of its letter, none for '-', and on the machine of its letter."""
    rank = dist.get_rank()
    site = {} if sites[rank] == "-" else {SITE: f" site {sites[rank]} "}
    with environment(GROUP_RANK=machines[rank], LOCAL_WORLD_SIZE="1", **site):
        yield


def train(sites: str, machines: str, spec: Any) -> tuple[str, tuple[tuple[int, ...], ...], list[int], bool, int]:
    """A few steps: a digest of the weights, the ranks of each node, those with which memory is shared, whether the plan is
    hierarchical, and the bytes that leave the node in a step."""
    torch.manual_seed(0)
    model = Given([50_000, 7])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with placed(sites, machines):
        handle = gw.parallelize(model, optimizer, plan=spec)
    for step in range(3):
        model(model.random_gradients(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    lanes, between = handle.session.lanes, handle.stats().inter_bytes
    is_hierarchical = all("reducescatter:intra" in bucket.option for bucket in handle.plan.buckets)
    found = digest(model.parameters()), lanes.group.grid.members, shared_with(handle)[0], is_hierarchical, between
    handle.detach()
    return found


def test_gradients_are_added_at_a_site_before_they_leave_it(own_worlds: Worlds) -> None:
    apart = own_worlds.run(4, train, "----", "0123", gw.QSGD(bits=4))
    named = own_worlds.run(4, train, "aabb", "0123", gw.QSGD(bits=4))
    assert [members for _, members, *_ in apart] == [((0,), (1,), (2,), (3,))] * 4
    assert [members for _, members, *_ in named] == [((0, 1), (2, 3))] * 4
    assert len({weights for weights, *_ in named}) == 1
    assert all(shared == [] for _, _, shared, *_ in named), "each rank is a machine of its own"
    assert all(is_hierarchical for *_, is_hierarchical, _ in named)
    across = [sum(each[-1] for each in ends) for ends in (named, apart)]
    assert across[0] < 0.36 * across[1], "of flat bytes two thirds go to another site, and half of these stay"


@pytest.mark.parametrize(("sites", "nodes"), [("aaab", ((0, 1, 2), (3,))), ("aaaa", ((0, 1), (2, 3)))])
def test_ranks_of_a_machine_share_memory_at_their_site(
    own_worlds: Worlds, sites: str, nodes: tuple[tuple[int, ...], ...]
) -> None:
    """One site for all says nothing: then the machines are nodes."""
    ends = own_worlds.run(4, train, sites, "0011", gw.QSGD(bits=4))
    assert [members for _, members, *_ in ends] == [nodes] * 4
    assert [shared for _, _, shared, *_ in ends] == [[1], [0], [3], [2]]
    assert len({weights for weights, *_ in ends}) == 1


def test_the_card_of_an_older_version_is_read_so_that_versions_are_compared() -> None:
    card = msgspec.json.decode(b'{"version":"0.2.0","frame":7,"node":"host","meshes":[]}', type=rendezvous.Card)
    with pytest.raises(gw.DisagreementError, match="version of gradwire"):
        rendezvous._check([rendezvous.Card("0.3.0", 8, "host", []), card])


def refused(sites: str) -> tuple[str, tuple[int, ...]]:
    with placed(sites, "0123"), pytest.raises(gw.DisagreementError) as caught:
        gw.parallelize(Given([7]), plan=gw.Identity())
    return str(caught.value), tuple(caught.value.ranks or ())


def test_some_ranks_without_a_site_are_refused_on_all(own_worlds: Worlds) -> None:
    ends = own_worlds.run(4, refused, "aa-b")
    assert len({*ends}) == 1
    words, ranks = ends[0]
    assert "rank 2 names no site, and rank 0 is at 'site a'" in words and SITE in words and ranks == (2,)
    assert SITE not in os.environ
