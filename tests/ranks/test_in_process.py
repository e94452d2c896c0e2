"""Ranks that are threads of one process: the bits of gloo's processes, and what becomes of ranks that fail, stall or differ."""

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_exchange import SPECS
from threads import Threads, here
from worlds import Given, Worlds, digest, seeded

import gradwire as gw
from gradwire.core.collectives import COLLECTIVES
from gradwire.transport import in_process
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.link import Link

SHAPES = [(1,), (7,), (33, 9), (130,), (40, 11)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]
STEPS = 2


def carried(scheme: str) -> list[gw.Spec]:
    """The specs that a scheme runs."""
    collective = COLLECTIVES[scheme]
    return [spec for spec in SPECS if (collective.carries(spec) if spec.encodes else collective.plain)]


def means(scheme: str) -> list[list[torch.Tensor]]:
    """Of each spec that the scheme runs, the means of all steps."""
    specs = carried(scheme)
    rules = [(f"{index}.*", spec) for index, spec in enumerate(specs)]
    policy = gw.Policy(default=specs[0], rules=rules, scheme=scheme, bucket_bytes=2000, chunk_bytes=900, exempt_vectors=False)

    def given(step: int) -> dict[str, torch.Tensor]:
        generator, pairs = seeded(step, here.rank), list(enumerate(zip(SHAPES, DTYPES, strict=True)))
        return {
            f"{index}.{at}": torch.randn(shape, generator=generator).to(dtype)
            for index in range(len(specs))
            for at, (shape, dtype) in pairs
        }

    exchange = gw.Exchange(given(0), policy, here.group)
    found: list[list[torch.Tensor]] = [[] for _ in specs]
    for step in range(STEPS):
        own = given(step)
        exchange.average_(own)
        for name, mean in own.items():
            found[int(name.partition(".")[0])].append(mean)
    exchange.close()
    return found


SUMMED = (gw.PowerSGD, gw.RandomK)
"""Gloo sums what these send, of three ranks in an order of its own."""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=[pytest.mark.slow, pytest.mark.thorough]), 3])
def test_all_specs_and_schemes_give_the_bits_of_processes(threads: Threads, worlds: Worlds, ranks: int) -> None:
    compared = set()
    for scheme in COLLECTIVES:
        in_threads, in_processes = threads.run(ranks, means, scheme), worlds.run(ranks, means, scheme)
        for index, spec in enumerate(carried(scheme)):
            ours, theirs = ([digest(rank[index]) for rank in each] for each in (in_threads, in_processes))
            assert len(set(ours)) == len(set(theirs)) == 1, (scheme, spec)
            if ranks == 3 and scheme == "allreduce" and isinstance(spec, SUMMED):
                for mean, other in zip(in_threads[0][index], in_processes[0][index], strict=True):
                    off = (mean.double() - other.double()).norm() / other.double().norm()
                    assert off < 8 * torch.finfo(mean.dtype).eps, (scheme, spec)
            else:
                assert ours == theirs, (scheme, spec)
            compared.add(spec)
    assert compared == set(SPECS)


# ---- links


def link_of(group: InProcessGroup, timeout_s: float = 20.0) -> Link:
    return Link(group.meet(timedelta(seconds=timeout_s)), "link", torch.device("cpu"), timedelta(seconds=timeout_s))


def reduced(group: InProcessGroup) -> list[float]:
    link, found = link_of(group), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        value = torch.tensor([[1e8, 1.0, -1e8][group.rank]])
        link.all_reduce(value, op).wait()
        found.append(value.item())
    link.close()
    return found


def test_sums_are_made_in_rank_order() -> None:
    assert run_ranks(3, reduced) == [[0.0, 1e8, -1e8]] * 3  # 1 is lost in 1e8; in another order it would be left


def shared_out(group: InProcessGroup) -> tuple[list[int], list[int]]:
    link, own = link_of(group), torch.tensor([group.rank, 10 * group.rank])
    received = torch.empty(2 * group.world_size, dtype=own.dtype)
    link.all_gather(received, own).wait()
    link.broadcast(own, root=1).wait()
    link.close()
    return received.tolist(), own.tolist()


def test_all_ranks_get_what_one_or_each_gives() -> None:
    assert run_ranks(3, shared_out) == [([0, 0, 1, 10, 2, 20], [1, 10])] * 3


def in_turn(group: InProcessGroup, receiver_first: bool) -> list[float]:
    """What rank 1 receives: three messages of two tags, which rank 0 changes when it has sent them."""
    link = link_of(group)
    backend = link.backend
    if group.rank == 0:
        if receiver_first:
            group.gather(None)
        for value, tag in ((1.0, 7), (2.0, 8), (3.0, 7)):
            message = torch.tensor([value])
            backend.send([message], 1, tag).wait()
            message.zero_()
        if not receiver_first:
            group.gather(None)
        return []
    if not receiver_first:
        group.gather(None)
    into = [torch.zeros(1) for _ in range(3)]
    dropped = backend.recv([torch.zeros(1)], 0, 8) if receiver_first else None
    del dropped  # it takes no message
    works = [backend.recv([part], 0, tag) for part, tag in zip(into, (7, 7, 8), strict=True)]
    if receiver_first:
        group.gather(None)
    for work in works:
        work.wait()
    return [part.item() for part in into]


@pytest.mark.parametrize("receiver_first", [True, False])
def test_messages_of_a_tag_arrive_in_order(receiver_first: bool) -> None:
    assert run_ranks(2, in_turn, receiver_first)[1] == [1.0, 3.0, 2.0]


def failing(group: InProcessGroup, how: str) -> str:
    """What is said to a rank that waits while rank 1 does something else."""
    link, value = link_of(group, 0.5 if how == "silent" else 20.0), torch.zeros(4)
    try:
        if how == "sizes":
            link.expect(0, [torch.empty(3 + group.rank)] * 2, checked=False).send([torch.zeros(4)] * 2)
            exchange = link.expect(1, [torch.empty(3 + group.rank)] * 2, checked=False)
            exchange.send([torch.zeros(4)] * 2)
            exchange.wait(1 - group.rank)
        elif group.rank == 0:
            link.all_reduce(value).wait(link.timeout)
        elif how == "another call":
            link.broadcast(value).wait(link.timeout)
        elif how == "break off":
            time.sleep(0.2)
            link.break_off()
            link.all_reduce(value).wait(link.timeout)
        elif how == "close":
            link.close()
            group.gather(None)
        elif how == "silent":
            group.gather(None)
    except Exception as error:
        if group.rank == 0 and how in ("close", "silent"):
            group.gather(None)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("another call", *["ValueError: rank . called .* where another rank called "] * 2),
        ("break off", *["ConnectionError: the link was broken off"] * 2),
        ("close", "ConnectionError: rank 1 ended", ""),
        ("silent", "TimeoutError: nothing came from rank 1 within 0.5 s", ""),
        ("sizes", "LinkError: rank 1 sent 16 bytes, and 12 bytes are received", ""),
    ],
)
def test_waits_fail_with_the_reason(how: str, first: str, second: str) -> None:
    told = run_ranks(2, failing, how)
    for words, expected in zip(told, (first, second), strict=True):
        assert re.match(expected, words) and bool(words) == bool(expected)


# ---- ranks that fail


def left(group: InProcessGroup, raises: bool, told: dict[int, str]) -> None:
    exchange = gw.Exchange({"w": torch.ones(30)}, gw.QSGD(bits=4), group)
    exchange.average_()
    if group.rank == 1:
        if raises:
            raise KeyError("as ordered")
        return
    with pytest.raises(gw.CommunicationError) as caught:
        exchange.average_()
    told[group.rank] = str(caught.value)


@pytest.mark.parametrize("raises", [True, False])
def test_a_rank_that_ends_is_named_to_those_who_wait_for_it(raises: bool) -> None:
    told: dict[int, str] = {}
    if raises:
        with pytest.raises(KeyError, match="as ordered") as caught:
            run_ranks(3, left, raises, told)
        assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    else:
        run_ranks(3, left, raises, told)
    assert told.keys() == {0, 2}
    for words in told.values():
        assert "step 1: rank" in words and "rank 1 did not answer" in words
    assert any("(The backend said: rank 1 ended)" in words for words in told.values())


def stalled(group: InProcessGroup, until: threading.Event) -> None:
    if group.rank == 1:
        until.wait(20.0)


def test_a_rank_that_does_not_end_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_AFTER_S", 0.1)
    until = threading.Event()
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks did not end within 0.2 s\.\nrank 1 is here:[\s\S]*until\.wait"):
        run_ranks(2, stalled, until, timeout_s=0.2)
    until.set()


def test_each_rank_has_a_node() -> None:
    assert run_ranks(3, lambda group: group.gather(group.machine_name()), nodes="aba") == [["a", "b", "a"]] * 3
    with pytest.raises(ValueError, match="nodes names the nodes of 2 ranks, and there are 3"):
        run_ranks(3, lambda group: None, nodes="ab")


def test_a_world_without_a_default_group_needs_none() -> None:
    assert not dist.is_initialized()

    def trained(group: InProcessGroup) -> list[float]:
        model = Given([5])
        handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()), process_group=group)
        model([torch.full((5,), float(group.rank))]).backward()
        handle.detach()
        assert model.p0.grad is not None
        return model.p0.grad.tolist()

    assert run_ranks(4, trained) == [[1.5] * 5] * 4
