"""Values of all ranks that are merged with few messages: who sends to whom, and the same bits on all ranks."""

import math
import random
import socket
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from gradwire.transport.merging import MergedValues, gather_over_ranks, merge_over_ranks
from gradwire.transport.messages import Messages
from gradwire.transport.rounds import merge_rounds
from gradwire.transport.wire import DamagedError, LinkError

SIZES = [1, 2, 3, 5, 16, 17, 18, 23, 37, 64, 100, 257]


@pytest.mark.parametrize("world_size", SIZES)
def test_every_rank_merges_every_rank_once_and_in_order(world_size: int) -> None:
    rounds = [merge_rounds(rank, world_size) for rank in range(world_size)]
    merged = [[rank] for rank in range(world_size)]
    for level in range(len(rounds[0])):
        sent = {(rank, to) for rank in range(world_size) for to in rounds[rank][level].targets}
        received = {(source, rank) for rank in range(world_size) for source in rounds[rank][level].sources}
        assert sent == {(source, rank) for source, rank in received if source != rank}
        merged = [[other for source in rounds[rank][level].sources for other in merged[source]] for rank in range(world_size)]
    assert merged == [list(range(world_size))] * world_size


def test_messages_and_hops_grow_as_the_logarithm() -> None:
    for world_size in [*range(2, 70), 100, 256, 500, 1024]:
        for rank in range(0, world_size, 1 + world_size // 40):
            rounds = merge_rounds(rank, world_size)
            assert sum(len(each.targets) for each in rounds) <= max(15, 4 * math.log2(world_size))
            assert len(rounds) <= math.ceil(math.log(world_size, 16))


def on_connected_ranks(world_size: int, work: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """What `work(link)` returned or raised on each rank: a thread for each, and a connection for each pair that exchanges."""
    pairs = {
        (low, high): socket.socketpair()
        for low, high in combinations(range(world_size), 2)
        if any(high in (*each.sources, *each.targets) for each in merge_rounds(low, world_size))
    }
    timeout = timedelta(seconds=timeout_s)
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        own = {low + high - rank: ends[rank == high] for (low, high), ends in pairs.items() if rank in (low, high)}
        backend = Messages(own, rank, world_size, timeout)
        link = SimpleNamespace(
            rank=rank, world_size=world_size, timeout=timeout, backend=backend, finish_later=lambda sends: sends.finish()
        )
        try:
            found[rank] = work(link)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ends in pairs.values():
        for each in ends:
            each.close()
    return found


@pytest.mark.parametrize("world_size", [1, 3, 16, 17, 23])
def test_all_ranks_get_the_same_bits(world_size: int) -> None:
    chance = random.Random(world_size)
    own = [
        MergedValues((1 << rank).to_bytes(5, "little"), (chance.gauss(0, 1), -float(rank)), (chance.uniform(0, 1e6), 1.0))
        for rank in range(world_size)
    ]
    found = on_connected_ranks(world_size, lambda link: [merge_over_ranks(link, own[link.rank], 5) for _ in range(3)])
    assert all(each == found[0] for each in found)
    for merged in found[0]:
        assert int.from_bytes(merged.bits, "little") == 2**world_size - 1
        assert merged.most == (max(each.most[0] for each in own), 0.0)
        assert merged.sums == (pytest.approx(sum(each.sums[0] for each in own)), world_size)


@pytest.mark.parametrize("world_size", [1, 3, 16, 17, 23])
def test_all_ranks_get_the_bytes_of_each(world_size: int) -> None:
    own = [random.Random(rank).randbytes(7) for rank in range(world_size)]
    found = on_connected_ranks(world_size, lambda link: [gather_over_ranks(link, own[link.rank], 5) for _ in range(3)])
    assert found == [[own] * 3] * world_size


class Calls(TorchFunctionMode):
    """Counts calls of torch."""

    def __init__(self, functions: Collection[Any] = ()) -> None:
        """`functions`: of these alone."""
        super().__init__()
        self.functions, self.count = functions, 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += not self.functions or function in self.functions
        return function(*arguments, **(options or {}))


def test_short_values_are_no_tensors() -> None:
    """A call of torch takes as long as the rest of a message."""

    def work(link: Any) -> int:
        with (made := Calls()):
            merge_over_ranks(link, MergedValues(b"\1", (2.0,), (3.0,)), 5)
            gather_over_ranks(link, b"123", 5)
        return made.count

    assert on_connected_ranks(18, work) == [0] * 18


def test_values_of_another_length_are_told() -> None:
    errors = on_connected_ranks(2, lambda link: merge_over_ranks(link, MergedValues(bytes(1 + link.rank)), 5))
    assert [error.peer for error in errors] == [1, 0]
    assert [str(each) for each in errors] == [
        "rank 1 sent 6 bytes where 5 were expected",
        "rank 0 sent 5 bytes where 6 were expected",
    ]


@pytest.mark.parametrize(("op", "expected"), [(dist.ReduceOp.MAX, [18.0, 0.0]), (dist.ReduceOp.MIN, [0.0, -18.0])])
def test_the_largest_of_many_ranks_is_found_in_one_call(op: Any, expected: list[float]) -> None:
    def work(link: Any) -> Any:
        own, options = torch.tensor([link.rank, -link.rank, math.nan if link.rank == 5 else 0.0]), dist.AllreduceOptions()
        options.reduceOp = op
        with Calls([torch.maximum, torch.minimum]) as made:
            link.backend.allreduce([own], options)
        return own[:2].tolist(), math.isnan(own[2]), made.count

    assert on_connected_ranks(19, work) == [(expected, True, 0)] * 19


def test_nothing_is_sent_before_begin() -> None:
    def work(link: Any) -> Any:
        def begin() -> None:
            if link.rank == 1:
                raise RuntimeError("gave up")

        return merge_over_ranks(link, MergedValues(b"\1"), 1, begin)

    first, second = on_connected_ranks(2, work, timeout_s=0.2)
    assert isinstance(second, RuntimeError)
    assert isinstance(first, LinkError) and first.peer == 1 and "Timed out" in str(first)


@pytest.mark.parametrize(
    "gather",
    [lambda link: merge_over_ranks(link, MergedValues(b"\1\2", (1.0,)), 1), lambda link: gather_over_ranks(link, b"\1\2", 1)],
    ids=["merged", "gathered"],
)
def test_bytes_that_were_changed_name_who_sent_them(gather: Callable[[Any], Any]) -> None:
    def work(link: Any) -> Any:
        if link.rank == 2:
            send = link.backend.send_bytes
            link.backend.send_bytes = lambda what, to, tag: send(bytes(each ^ 4 for each in what), to, tag)
        return gather(link)

    for error in on_connected_ranks(4, work)[:2]:
        assert isinstance(error, DamagedError) and error.peer == 2, error
