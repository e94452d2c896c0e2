"""All-reduce through memory, between threads of one process."""

import threading
from typing import Any

import pytest
import torch
from fake_links import wires

from gradwire.collectives import AllReduce
from gradwire.collectives.shared_memory_sum import MemorySum, can_sum
from gradwire.kernels import cpu
from gradwire.transport import LinkError, Meter
from gradwire.transport.streams import Streams
from gradwire.transport.wire import Wire

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")


def run(connected: list[Wire], sums: list[MemorySum], tag: int = 0) -> None:
    lists = [each.operations(tag) for each in sums]
    threads = [
        threading.Thread(target=wire.run, args=(made, Meter())) for wire, made in zip(connected, lists, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_all_ranks_have_the_sum_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    connected = wires(world_size, shared=True)
    assert all(wire.shares_with_all for wire in connected)
    for numel in (1, 7, 123, 4097, 2**20 + 1):
        flats = [torch.randn(numel).to(dtype) for _ in range(world_size)]
        expected = flats[0].clone()
        for flat in flats[1:]:
            expected += flat
        sums = [MemorySum(flat, rank, world_size) for rank, flat in enumerate(flats)]
        run(connected, sums)
        for flat in flats:
            assert torch.equal(flat, expected)
            flat.fill_(1)
        run(connected, sums)  # the same lists again
        assert all((flat == world_size).all() for flat in flats)
    for wire in connected:
        wire.close()


def test_a_list_follows_memory_that_moved() -> None:
    flat = torch.ones(100)
    made = MemorySum(flat, 0, 2)
    first = made.operations(4)
    assert made.operations(4) is first is not made.operations(5)
    memory = torch.zeros(100).untyped_storage()
    for alias in AllReduce(flat, 0, 2).aliases + made.parts:
        alias.set_(memory, alias.storage_offset(), alias.shape, alias.stride())  # type: ignore[call-overload]
    moved = made.operations(5)
    assert moved is not first and moved is made.operations(5)


def test_what_the_kernels_do_not_add_stays_with_the_backend() -> None:
    assert can_sum(torch.zeros(1)) and not can_sum(torch.zeros(1, dtype=torch.float64))
    assert not can_sum(torch.zeros(1, device="meta"))


def test_without_memory_of_all_ranks_the_backend_sums() -> None:
    class Backend:
        streams, wire = Streams(), None

        def all_reduce(self, flat: torch.Tensor) -> None:
            raise OSError("asked")

    link: Any = Backend()
    (by_tcp, _), memory = wires(2), wires(3, shared=True)[0]
    memory._rings.pop(2).close()
    reduce = AllReduce(torch.zeros(5), 0, 2)
    for wire in (None, by_tcp, memory):
        link.wire = wire
        assert wire is None or not wire.shares_with_all
        with pytest.raises(LinkError, match="asked"):
            reduce.run(0, link, Meter(), None)
