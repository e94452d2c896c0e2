"""The virtual grid: equal bits on all ranks, the exact mean where nothing is lost, the messages and bytes that are priced."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from options import Ranks, gradients, plan_for, true_mean
from test_exchange import SPECS
from threads import Threads, here
from worlds import digest, seeded

import gradwire as gw
from gradwire.core import COLLECTIVES, TensorInfo, rows_of
from gradwire.costs import bytes_of
from gradwire.costs.steps import steps_of
from gradwire.exchange import layout
from gradwire.transport import Grid, in_process

GRID = COLLECTIVES["grid"]
SHAPES = [(1,), (7,), (33, 9), (130,), (40, 11)]
CARRIED = [spec for spec in SPECS if spec.encodes and GRID.carries(spec)]


def means(specs: Sequence[gw.Spec], steps: int, chunk_bytes: int = 900) -> list[list[list[torch.Tensor]]]:
    """For each step and each spec the means."""
    rules = [(f"{index}.*", spec) for index, spec in enumerate(specs)]
    policy = gw.Policy(
        default=specs[0], rules=rules, scheme="grid", bucket_bytes=2000, chunk_bytes=chunk_bytes, exempt_vectors=False
    )

    def given(step: int) -> dict[str, torch.Tensor]:
        generator = seeded(step, here.rank)
        every = [(index, at) for index in range(len(specs)) for at in range(len(SHAPES))]
        return {f"{index}.{at}": torch.randn(SHAPES[at], generator=generator) for index, at in every}

    exchange = gw.Exchange(given(0), policy, here.group)
    found = []
    for step in range(steps):
        own = given(step)
        exchange.average_(own)
        found.append([[own[f"{index}.{at}"] for at in range(len(SHAPES))] for index in range(len(specs))])
    exchange.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 7, 9, 11, 16, 17])
def test_all_ranks_have_the_same_bits(threads: Threads, ranks: int) -> None:
    specs = CARRIED if ranks <= 6 else [gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(0.1))]
    found = threads.run(ranks, means, specs, 2)
    for step in range(2):
        for index, spec in enumerate(specs):
            assert len({digest(rank[step][index]) for rank in found}) == 1, spec


@pytest.mark.parametrize("ranks", [4, 6, 9, 11, 16, 17])
def test_the_mean_is_right(threads: Threads, ranks: int) -> None:
    """A cast to 16 bits at each of three encodes."""
    (found,) = threads.run(ranks, means, [gw.Cast("bfloat16")], 1)[0]
    drawn = [seeded(0, rank) for rank in range(ranks)]
    for at, shape in enumerate(SHAPES):
        expected = torch.stack([torch.randn(shape, generator=generator) for generator in drawn]).double().mean(0)
        assert (found[0][at].double() - expected).norm() <= 0.01 * expected.norm() + 0.01


def test_error_feedback_sends_all_in_the_end(threads: Threads) -> None:
    """What an encode left out is sent later, whether of a gradient or of a sum."""
    steps, ranks = 30, 6
    exact = [torch.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        drawn = [seeded(step, rank) for rank in range(ranks)]
        for at, shape in enumerate(SHAPES):
            exact[at] += torch.stack([torch.randn(shape, generator=generator) for generator in drawn]).mean(0)
    errors = []
    for spec in (gw.ErrorFeedback(gw.QSGD(bits=2)), gw.QSGD(bits=2)):
        found = threads.run(ranks, means, [spec], steps)[0]
        sums = [torch.stack([found[step][0][at] for step in range(steps)]).sum(0) for at in range(len(SHAPES))]
        errors.append(float(torch.cat([(s - e).flatten() for s, e in zip(sums, exact, strict=True)]).norm()))
    assert errors[0] < 0.6 * errors[1]


SIZES = (7000, 130, 7, 1)
FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=2))


def on_grid(ranks: int, spec: gw.Spec, wired: bool = False, in_place: bool = False) -> Ranks:
    plan = plan_for(GRID.on("cpu"), spec, SIZES, chunk_bytes=16384)
    return Ranks(plan, [Grid.even(ranks, 1, rank) for rank in range(ranks)], SIZES, wired=wired, in_place=in_place)


@pytest.mark.parametrize("ranks", [6, 7, 11, 17])
def test_nothing_is_lost_with_error_feedback(ranks: int) -> None:
    """What was sent and what is held back are all gradients, and again after the means of a step are taken back."""
    every, sent, given = on_grid(ranks, FEEDBACK), torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    for step in range(3):
        every.step(step, [gradients(rank, step, SIZES) for rank in range(ranks)])
        results = every.results()
        assert len({digest([result]) for result in results}) == 1
        sent += results[0].double()
        given += true_mean(ranks, step, SIZES)
    assert (sent + every.held_back() - given).norm() <= 1e-6 * given.norm()
    mean = every.results()[0].double()
    for bucket in every.buckets:
        for chunk, start, end in zip(bucket.chunks, bucket.bounds, bucket.bounds[1:], strict=False):
            chunk.take_back(0, end - start)
    assert (sent - mean + every.held_back() - given).norm() <= 1e-6 * given.norm()


@pytest.mark.parametrize("ranks", [6, 11, 17])
def test_all_ranks_keep_what_another_scheme_remembered(ranks: int) -> None:
    every, values = on_grid(ranks, FEEDBACK), torch.randn(sum(SIZES), generator=seeded(0, 0))
    for bucket in every.buckets:
        for chunk, start, end in zip(bucket.chunks, bucket.bounds, bucket.bounds[1:], strict=False):
            chunk.take_over("residual", 0, values[start:end])
    assert torch.allclose(every.held_back(), ranks * values.double())


@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), FEEDBACK], ids=repr)
@pytest.mark.parametrize("ranks", [6, 11])
def test_one_call_for_several_payloads_lists_of_calls_and_gradients_that_are_lent_give_the_same_bits(
    ranks: int, spec: gw.Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [on_grid(ranks, spec), *(on_grid(ranks, spec, wired, in_place=True) for wired in (False, True))]
    made.append(on_grid(ranks, spec, wired=True))
    assert all(every.buckets[0].slots[0].apart for every in made[1:3])
    monkeypatch.setattr(layout, "launches", lambda device: True)
    made.append(on_grid(ranks, spec))
    for step in range(2):
        for every in made:
            every.step(step, [gradients(rank, step, SIZES) for rank in range(ranks)])
        assert len({digest([result]) for every in made for result in every.results()}) == 1


@pytest.mark.parametrize("ranks", [11, 17])
def test_pieces_smaller_than_the_grid(ranks: int) -> None:
    sizes = (1, 0, 2)
    every = Ranks(plan_for(GRID.on("cpu"), gw.QSGD(bits=8), sizes), [Grid.even(ranks, 1, rank) for rank in range(ranks)], sizes)
    every.step(0, [gradients(rank, 0, sizes) for rank in range(ranks)])
    assert all(torch.allclose(result.double(), true_mean(ranks, 0, sizes), atol=0.03) for result in every.results())


Message = tuple[int, int, int]
"""Source, target, bytes."""


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that hubs carry from now on."""
    sent: list[Message] = []
    send = in_process._Hub.send

    def counted(hub: Any, source: int, to: int, tag: int, message: torch.Tensor) -> Any:
        sent.append((source, to, message.nbytes))
        return send(hub, source, to, tag, message)

    monkeypatch.setattr(in_process._Hub, "send", counted)
    return sent


def exchanged(scheme: str, numel: int) -> None:
    """Average one tensor once."""
    policy = gw.Policy(default=SPEC, scheme=scheme, exempt_vectors=False)
    exchange = gw.Exchange({"w": torch.zeros(numel)}, policy, here.group)
    exchange.average_({"w": torch.ones(numel)})
    exchange.close()


SPEC = gw.QSGD(bits=8, block=128)


@pytest.mark.parametrize("scheme", ["grid", "alltoall", "allgather", "ring", "tree"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_prices_have_the_messages_and_bytes_that_are_sent(
    threads: Threads, messages: list[Message], scheme: str, ranks: int
) -> None:
    numel = 128 * 240
    threads.run(ranks, exchanged, scheme, numel)
    payload = bytes_of([TensorInfo("w", (numel,), "float32")], SPEC).first
    least = payload // (4 * ranks)  # control messages are shorter
    of_rank = [[nbytes for source, _, nbytes in messages if source == rank and nbytes > least] for rank in range(ranks)]
    steps = [step for step in steps_of(COLLECTIVES[scheme].on("cpu"), ranks, 1, routing="direct") if step.traffic is not None]
    priced = sum(step.traffic.inter.messages for step in steps if step.traffic is not None)
    if scheme == "tree":  # the longest path: a rank sends once up, or receives
        assert max(map(len, of_rank)) <= priced
        return
    assert {len(each) for each in of_rank} == {priced}
    factor = sum(step.traffic.sent * step.share * step.parts for step in steps if step.traffic is not None)
    for each in of_rank:
        assert sum(each) == pytest.approx(factor * payload, rel=0.2 if 240 % ranks else 0.02)


@pytest.mark.parametrize("ranks", [11, 17])
def test_prices_of_a_shorter_last_row_are_those_of_the_busiest_ranks(
    threads: Threads, messages: list[Message], ranks: int
) -> None:
    numel = 128 * 240
    threads.run(ranks, exchanged, "grid", numel)
    payload = bytes_of([TensorInfo("w", (numel,), "float32")], SPEC).first
    of_rank = [
        [nbytes for source, _, nbytes in messages if source == rank and nbytes > payload // (4 * ranks)] for rank in range(ranks)
    ]
    steps = [step for step in steps_of(GRID.on("cpu"), ranks, 1, routing="direct") if step.traffic is not None]
    priced = sum(step.traffic.inter.messages for step in steps if step.traffic is not None)
    factor = sum(step.traffic.sent * step.share * step.parts for step in steps if step.traffic is not None)
    assert priced - 4 <= max(map(len, of_rank)) <= priced, "no rank is the busiest of each phase"
    assert 0.85 * factor * payload <= max(map(sum, of_rank)) <= 1.05 * factor * payload
    peers = [
        len({to for source, to, nbytes in messages if source == rank and nbytes > payload // (4 * ranks)})
        for rank in range(ranks)
    ]
    assert max(peers) <= len(rows_of(ranks)) + rows_of(ranks)[0] - 2


@pytest.mark.parametrize(("nodes", "local"), [(4, 1), (6, 1), (16, 1), (2, 2), (4, 4), (3, 2), (1, 9)])
def test_the_grids_prices_are_those_of_its_pairs(nodes: int, local: int) -> None:
    """Count pairs of ranks by hand."""
    ranks = nodes * local
    columns, *_ = rows_of(ranks)
    steps = [step for step in steps_of(GRID.on("cpu"), nodes, local) if step.traffic is not None]
    for step, in_row in zip(steps, (True, False, False, True), strict=True):
        pairs = [
            (a, b)
            for a in range(ranks)
            for b in range(ranks)
            if a != b and (a // columns == b // columns if in_row else a % columns == b % columns)
        ]
        each = (1 / len({b for a, b in pairs if a == 0} | {0})) if step is steps[0] or step is steps[1] else 1.0
        leaving = [sum(a // local == node != b // local for a, b in pairs) for node in range(nodes)]
        assert step.traffic is not None and step.traffic.inter.factor == pytest.approx(max(leaving) * each)
        inside = max(sum(a == rank and a // local == b // local for a, b in pairs) for rank in range(ranks))
        assert step.traffic.intra.factor == pytest.approx(inside * each)
    assert columns * (ranks // columns) == ranks


@pytest.mark.parametrize(("nodes", "local"), [(11, 1), (17, 1), (1, 17), (67, 2), (1, 131), (131, 1)])
def test_the_prices_of_a_shorter_last_row_are_those_of_its_pairs(nodes: int, local: int) -> None:
    """Count messages by hand, with shards of equal size."""
    ranks = nodes * local
    rows = rows_of(ranks)
    columns, whole, last = rows[0], len(rows) - 1, rows[-1]
    shards = columns * whole
    in_row = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and a // columns == b // columns]
    to_owners = [(a, b) for a in range(shards) for b in range(shards) if a != b and a % columns == b % columns]
    for shard in range(shards):
        sender = next(at for at in range(last) if shard < shards * (at + 1) // last)
        to_owners.append((shards + sender, shard % whole * columns + shard // whole))
    steps = [step for step in steps_of(GRID.on("cpu"), nodes, local) if step.traffic is not None]
    for step, pairs in zip(steps, (in_row, to_owners, to_owners, in_row), strict=True):
        assert step.traffic is not None
        both = {*pairs, *((b, a) for a, b in pairs)}  # what a rank sends in one phase it gets in another
        inside = max(sum(a == rank and b // local == a // local for a, b in both) for rank in range(ranks))
        between = max(sum(a == rank and b // local != a // local for a, b in both) for rank in range(ranks))
        assert (step.traffic.intra.messages, step.traffic.inter.messages) == (inside, between)


def test_a_rank_encodes_and_decodes_as_much_as_in_the_tree_of_options() -> None:
    """As two hierarchical phases on as many nodes of as many ranks."""
    encoded, decoded = "comp:cpu", "decomp:cpu"
    reduce = (encoded, "alltoall:intra", decoded, encoded, "alltoall:inter", decoded)
    option = (*reduce, encoded, "allgather:inter", "allgather:intra", decoded)
    theirs = [(step.share * step.parts, step.payload) for step in steps_of(option, 3, 4)]
    ours = [(pytest.approx(step.share * step.parts), step.payload) for step in steps_of(GRID.on("cpu"), 12, 1)]
    assert theirs == ours
