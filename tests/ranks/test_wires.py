"""What C++ runs on wires has the bits of what Python runs on links, for every scheme that it can run; and where a rank has no
wires gloo carries gradients."""

import logging
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from beside_ddp import in_buckets
from options import Ranks, gradients, plan_for
from test_options_run import FOUR_ENCODES, ROOTED, SKIPPING, TWO_ENCODES
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.core import Spec
from gradwire.core.collectives import COLLECTIVES, uncompressed
from gradwire.transport import Grid, wires

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
    wires.log.setLevel(logging.INFO)
    listen = wires._listen
    if without == dist.get_rank():
        wires._listen = lambda *arguments: None  # type: ignore[assignment]
    torch.manual_seed(0)
    model = Given([3000, 20, 500])
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD(bits=4)))
    wires._listen = listen
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
def test_without_wires_on_one_rank_gloo_carries_the_same_bits(worlds: Worlds, world_size: int) -> None:
    usual = worlds.run(world_size, train, None)
    assert all(wired for _, wired, _, _ in usual)
    without = worlds.run(world_size, train, 1)
    assert not any(wired for _, wired, _, _ in without)
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


def refuse_connections() -> tuple[bool, list[str]]:
    """A rank that nobody can reach at the address that it tells."""
    card = wires._card
    if dist.get_rank() == 0:
        wires._card = lambda *arguments: card(*arguments) | {"port": 9}
    try:
        _, wired, told, _ = train(None)
    finally:
        wires._card = card
    return wired, told


def test_ranks_that_cannot_connect_use_gloo_and_say_why(worlds: Worlds) -> None:
    for wired, told in worlds.run(2, refuse_connections):
        assert not wired
        assert len(told) == 1 and told[0].startswith("gloo carries gradients: rank 1:"), told


def strangers() -> bool:
    """Somebody else connects first, says nonsense, and is not taken for a rank."""
    accept = wires._accept

    def disturbed(control, listener, *others):  # type: ignore[no-untyped-def]
        with socket.create_connection(listener.getsockname()[:2]) as stranger:
            stranger.sendall(b"GET / HTTP/1.1 and more")
        return accept(control, listener, *others)

    wires._accept = disturbed
    try:
        return train(None)[1]
    finally:
        wires._accept = accept


def test_strangers_are_turned_away(worlds: Worlds) -> None:
    assert all(worlds.run(2, strangers))


def another_frame() -> bool:
    """Rank 1 comes from a checkout with other headers of messages, and says the same version."""
    before, wires._FRAME = wires._FRAME, wires._FRAME - dist.get_rank()
    try:
        return train(None)[1]
    finally:
        wires._FRAME = before


def test_ranks_with_other_headers_use_gloo(worlds: Worlds) -> None:
    assert worlds.run(2, another_frame) == [False, False]
