"""Shards of unequal sizes: the same bits on all ranks, means as good as with equal shards, fewer bytes from a small shard."""

from typing import Any

import msgspec
import pytest
import torch
from threads import Threads, here
from worlds import Given, digest

import gradwire as gw

SIZES, STEPS = [(300, 40), (4097,), (50, 20), (1,)], 4
SHARES = (4, 4, 1, 4), (1, 1, 0, 1), (1, 5, 2)


def means(spec: gw.Spec, shares: tuple[int, ...], chunk_bytes: int, scheme: str = "alltoall") -> tuple[list[torch.Tensor], int]:
    """The gradients after each step, and the bytes that this rank sends in a step."""
    torch.manual_seed(0)
    model = Given(SIZES)
    infos = [gw.TensorInfo(name, tuple(p.shape), "float32") for name, p in reversed(list(model.named_parameters()))]
    policy = gw.Uniform(spec, scheme=scheme, bucket_bytes=2**20, chunk_bytes=chunk_bytes)
    plan = msgspec.structs.replace(policy.plan(infos, here.world_size), shares=shares)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
    found = []
    for step in range(STEPS):
        model(model.random_gradients(here.rank, step)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    sent = handle.stats().wire_bytes
    handle.detach()
    return found, sent


@pytest.mark.parametrize("chunk_bytes", [0, 8192])
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("spec", [gw.Identity(), gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))], ids=repr)
def test_all_ranks_have_the_same_bits(threads: Threads, spec: gw.Spec, shares: Any, chunk_bytes: int) -> None:
    ranks = len(shares)
    of_ranks = threads.run(ranks, means, spec, shares, chunk_bytes)
    even = threads.run(ranks, means, spec, (), chunk_bytes)
    assert len({digest(found) for found, _ in of_ranks}) == 1
    exact = threads.run(ranks, means, gw.Identity(), (), chunk_bytes)[0][0]
    if not spec.encodes:
        assert digest(of_ranks[0][0]) == digest(exact), "sums are in rank order, whoever owns them"
    assert distance(of_ranks[0][0], exact) <= 1.2 * distance(even[0][0], exact)
    smallest = shares.index(min(shares))
    assert of_ranks[smallest][1] < even[smallest][1]


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_only_direct_exchanges_have_shares(threads: Threads, scheme: str) -> None:
    given, even = (threads.run(3, means, gw.QSGD(bits=4), shares, 0, scheme) for shares in ((1, 5, 2), ()))
    assert [(digest(found), sent) for found, sent in given] == [(digest(found), sent) for found, sent in even]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float(sum((a - b).norm() ** 2 for a, b in zip(found, exact, strict=True)) ** 0.5)


def refused() -> str:
    with pytest.raises(gw.PlanError) as caught:
        means(gw.Identity(), (1, 2, 3), 0)
    return str(caught.value)


def test_shares_of_another_number_of_ranks_are_refused(threads: Threads) -> None:
    for told in threads.run(2, refused):
        assert "3 ranks" in told and "there are 2" in told
