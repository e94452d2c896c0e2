"""What C++ runs on wires has the bits of what Python runs on links, for every scheme that it can run; and where a rank has no
wires Python carries gradients."""

import logging
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from beside_ddp import in_buckets
from options import Ranks, gradients, plan_for, true_mean
from test_options_run import FOUR_ENCODES, ROOTED, SKIPPING, TWO_ENCODES
from worlds import Given, World, Worlds, digest

import gradwire as gw
from gradwire.core import Spec
from gradwire.core.collectives import COLLECTIVES, uncompressed
from gradwire.plan.schemes import tasks_of
from gradwire.transport import Grid, rendezvous, wires

NESTED_SUM = "reducescatter:intra allreduce:inter allgather:intra"
SCHEMES = ["alltoall", "allgather", "ring", "tree", "grid"]
SPECS = [
    gw.QSGD(bits=4),
    gw.ErrorFeedback(gw.QSGD(bits=2)),
    gw.ErrorFeedback(gw.TopK(0.05)),
    gw.SignSGD(),
    gw.Cast("float16"),
]
CARRIED = [(scheme, spec) for scheme in SCHEMES for spec in SPECS if COLLECTIVES[scheme].carries(spec)]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6])
@pytest.mark.parametrize(("scheme", "spec"), CARRIED, ids=repr)
def test_the_bits_are_those_of_python(scheme: str, world_size: int, spec: Spec, dtype: str) -> None:
    collective = COLLECTIVES[scheme]
    grid = [Grid.even(1, world_size, rank) for rank in range(world_size)]
    plan = plan_for(collective.on("cpu"), spec, dtype=dtype, chunk_bytes=1500)
    made = [Ranks(plan, grid, dtype=getattr(torch, dtype), root=1 % world_size, wired=wired) for wired in (False, True)]
    assert all(chunk.runs_in_c for chunk in made[1].buckets[0].chunks)
    for step in range(3):
        for ranks in made:
            ranks.step(step, [gradients(rank, step) for rank in range(world_size)])
        python, in_c = (ranks.results() for ranks in made)
        assert all(torch.equal(each, in_c[0]) and torch.equal(each, mine) for each, mine in zip(in_c, python, strict=True))
        states = [[rank.residuals.state() for rank in ranks.ranks] for ranks in made]
        for mine, theirs in zip(*states, strict=True):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("world_size", [2, 3, 6, 20])
@pytest.mark.parametrize("spec", [gw.ErrorFeedback(gw.RandomK(0.05)), gw.PowerSGD(start_step=0)], ids=repr)
def test_payloads_are_summed_on_wires(spec: Spec, world_size: int) -> None:
    """Not around a ring, whose hops grow with the ranks. The links of this test have no all-reduce."""
    grid = [Grid.even(world_size, 1, rank) for rank in range(world_size)]
    ranks = Ranks(plan_for(tasks_of("allreduce", "cpu", spec), spec), grid, wired=True)
    for step in range(2):
        before = ranks.held_back()
        ranks.step(step, [gradients(rank, step) for rank in range(world_size)])
        results = ranks.results()
        assert all(torch.equal(each, results[0]) for each in results)
        expected = true_mean(world_size, step) + before
        torch.testing.assert_close(results[0].double() + ranks.held_back(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [gw.Identity(), gw.ErrorFeedback(gw.QSGD(bits=2)), gw.TopK(0.05)], ids=repr)
@pytest.mark.parametrize("names", ["aabb", "abcabc"])
@pytest.mark.parametrize("option", [TWO_ENCODES, FOUR_ENCODES, ROOTED, SKIPPING, NESTED_SUM])
def test_routes_have_the_bits_of_python(option: str, names: str, spec: Spec, dtype: str) -> None:
    """What another plan left unsent too."""
    tasks = option.split() if spec.encodes else uncompressed(tuple(option.split()))
    if spec.encodes and "comp:cpu" not in tasks:
        return
    grid = [Grid.of(names, rank) for rank in range(len(names))]
    plan = plan_for(tasks, spec, dtype=dtype, chunk_bytes=1500)
    made = [Ranks(plan, grid, dtype=getattr(torch, dtype), root=1, wired=wired) for wired in (False, True)]
    assert all(chunk.runs_in_c for bucket in made[1].buckets for chunk in bucket.chunks)
    for step in range(3):
        for ranks in made:
            for bucket in ranks.buckets:
                if step == 1 and spec.feedback:
                    bucket.chunks[0].take_over("residual", 0, torch.full((bucket.bounds[1],), 0.25))
            ranks.step(step, [gradients(rank, step) for rank in range(len(grid))])
        python, in_c = (ranks.results() for ranks in made)
        assert all(torch.equal(each, in_c[0]) and torch.equal(each, python[0]) for each in in_c)
        states = [[rank.residuals.state() for rank in ranks.ranks] for ranks in made]
        for mine, theirs in zip(*states, strict=True):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def train(without: int | None, keep_views: bool = False) -> tuple[str, bool, list[str], list[torch.Tensor]]:
    """A few steps; rank `without` has no wires. `keep_views`: of gradients, so that buckets move."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    wires.log.addHandler(handler)
    able = rendezvous.why_no_wires
    if without == dist.get_rank():
        rendezvous.why_no_wires = lambda: "the test wants none"
    torch.manual_seed(0)
    model = Given([3000, 20, 500])
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD(bits=4)))
    rendezvous.why_no_wires = able
    wired = all(lane.link.wire is not None for lane in handle.session.exchange.lanes.data)
    kept = []
    for step in range(6):
        model.zero_grad()
        model(model.random_gradients(dist.get_rank(), step)).backward()
        if keep_views:
            kept += [(p.grad.view(-1), p.grad.clone().view(-1)) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    state = handle.state_dict()
    handle.detach()
    wires.log.removeHandler(handler)
    assert all(torch.equal(view, values) for view, values in kept)
    return digest(model.parameters()), wired, told, [state[key] for key in sorted(state)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_wires_on_one_rank_python_carries_the_same_bits(worlds: Worlds, world_size: int) -> None:
    usual = worlds.run(world_size, train, None)
    assert all(wired for _, wired, _, _ in usual)
    without = worlds.run(world_size, train, 1)
    assert not any(wired for _, wired, _, _ in without)
    first, *later = [told for _, _, told, _ in without]
    assert len(first) == 1 and "rank 1: the test wants none" in first[0] and not any(later)
    for (weights, _, _, state), (others, _, _, their_state) in zip(usual, without, strict=True):
        assert weights == others == usual[0][0]
        assert all(torch.equal(*each) for each in zip(state, their_state, strict=True))


def train_in_buckets(keep_views: bool = False) -> tuple[str, bool, list[str], list[torch.Tensor]]:
    with in_buckets():
        return train(None, keep_views)


def test_buckets_that_move_are_followed(worlds: Worlds) -> None:
    """A script keeps views of its gradients, so their memory is left to it."""
    usual, moving = worlds.run(2, train_in_buckets), worlds.run(2, train_in_buckets, True)
    assert [weights for weights, *_ in usual] == [weights for weights, *_ in moving]


def refuse_connections() -> str:
    """A rank that nobody can reach at the address that it tells."""
    listen = rendezvous._listen
    if dist.get_rank() == 0:
        rendezvous._listen = closed_door
    try:
        with pytest.raises(gw.CommunicationError) as caught:
            train(None)
    finally:
        rendezvous._listen = listen
    return str(caught.value)


def closed_door(host: str) -> socket.socket:
    """A socket with an address at which nobody listens."""
    made = socket.socket()
    made.bind((host, 0))
    return made


def test_ranks_that_cannot_connect_say_why() -> None:
    with World(2, group_timeout_s=5.0) as world:
        _, told = world.run(refuse_connections)
    assert "Connection refused at 127.0.0.1 port" in told


def another_frame() -> str:
    """Rank 1 comes from a checkout with other headers of messages, and says the same version."""
    before, rendezvous._FRAME = rendezvous._FRAME, rendezvous._FRAME - dist.get_rank()
    try:
        with pytest.raises(gw.DisagreementError) as caught:
            train(None)
    finally:
        rendezvous._FRAME = before
    return str(caught.value)


def test_ranks_with_other_headers_are_refused(worlds: Worlds) -> None:
    first, second = worlds.run(2, another_frame)
    assert first == second and "ranks disagree on the version of gradwire" in first
