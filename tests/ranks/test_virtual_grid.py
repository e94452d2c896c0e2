"""The virtual grid: equal bits on all ranks, the exact mean where nothing is lost, the messages and bytes that are priced."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_exchange import SPECS
from threads import Threads, here
from worlds import digest, seeded

import gradwire as gw
from gradwire.core import COLLECTIVES, TensorInfo, columns_of
from gradwire.costs import bytes_of
from gradwire.costs.steps import steps_of
from gradwire.transport import in_process

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


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 7, 9, 16])
def test_all_ranks_have_the_same_bits(threads: Threads, ranks: int) -> None:
    specs = CARRIED if ranks <= 6 else [gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(0.1))]
    found = threads.run(ranks, means, specs, 2)
    for step in range(2):
        for index, spec in enumerate(specs):
            assert len({digest(rank[step][index]) for rank in found}) == 1, spec


@pytest.mark.parametrize("ranks", [4, 6, 9, 16])
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


@pytest.mark.parametrize(("nodes", "local"), [(4, 1), (6, 1), (16, 1), (2, 2), (4, 4), (3, 2), (1, 9)])
def test_the_grids_prices_are_those_of_its_pairs(nodes: int, local: int) -> None:
    """Count pairs of ranks by hand."""
    ranks = nodes * local
    columns = columns_of(ranks)
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


def test_a_rank_encodes_and_decodes_as_much_as_in_the_tree_of_options() -> None:
    """As two hierarchical phases on as many nodes of as many ranks."""
    encoded, decoded = "comp:cpu", "decomp:cpu"
    reduce = (encoded, "alltoall:intra", decoded, encoded, "alltoall:inter", decoded)
    option = (*reduce, encoded, "allgather:inter", "allgather:intra", decoded)
    theirs = [(step.share * step.parts, step.payload) for step in steps_of(option, 3, 4)]
    ours = [(pytest.approx(step.share * step.parts), step.payload) for step in steps_of(GRID.on("cpu"), 12, 1)]
    assert theirs == ours
