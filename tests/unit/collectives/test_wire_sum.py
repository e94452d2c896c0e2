"""All-reduce on wires, by TCP and through memory, between threads of one process."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_links import wires

from gradwire.collectives import AllReduce
from gradwire.collectives.wire_sum import Halving, RingSum, WireSum, can_sum, even_bounds, stages_of
from gradwire.kernels import cpu
from gradwire.transport import Grid, LinkError, Meter, Operations
from gradwire.transport.streams import Streams
from gradwire.transport.wire import Wire

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")

WAYS = {"halving": Halving, "ring": RingSum}


def run(connected: list[Wire], lists: list[Operations]) -> None:
    with ThreadPoolExecutor(len(lists)) as pool:
        for done in [pool.submit(wire.run, made, Meter()) for wire, made in zip(connected, lists, strict=True)]:
            done.result(30)


def listed(way: str, flats: list[torch.Tensor], nodes: int, connected: list[Wire], by_node: bool) -> list[Operations]:
    size, lists = len(flats), []
    for rank, flat in enumerate(flats):
        grid = Grid.even(nodes, size // nodes, rank)
        made, sums = Operations(), WAYS[way](flat, grid, even_bounds(flat.numel(), size), by_node)
        sums.reduce(made, 0, connected[rank].shared_with)
        sums.gather(made, 1)
        made.flush()
        lists.append(made)
    return lists


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "memory"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_all_ranks_have_the_same_sum(world_size: int, shared: bool, dtype: torch.dtype, way: str) -> None:
    if way == "ring" and world_size == 1:
        pytest.skip("a ring has at least two ranks")
    torch.manual_seed(0)
    connected = wires(world_size, shared=shared)
    nodes = 2 if world_size in (4, 6) else world_size
    several_pieces = 2**20 + 1 if dtype == torch.float32 else 2**17 + 1  # of float32 alone
    for numel in (1, 7, 123, 4097, several_pieces):
        flats = [torch.randn(numel).to(dtype) for _ in range(world_size)]
        expected = torch.stack([flat.double() for flat in flats]).sum(0)
        rank_order = flats[0].clone()
        for flat in flats[1:]:
            rank_order += flat
        lists = listed(way, flats, nodes, connected, by_node=numel % 2 == 1)
        run(connected, lists)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        steps = world_size * torch.finfo(dtype).eps * 4
        torch.testing.assert_close(flats[0].double(), expected, rtol=steps, atol=steps)
        if world_size <= (3 if way == "halving" else 2):
            assert torch.equal(flats[0], rank_order)
        for flat in flats:
            flat.fill_(1)
        run(connected, lists)  # the same lists again
        assert all((flat == world_size).all() for flat in flats)
    for wire in connected:
        wire.close()


def test_a_sum_by_halving_does_not_depend_on_the_place_of_the_element() -> None:
    torch.manual_seed(0)
    connected = wires(6)
    rows = [torch.randn(1) for _ in range(6)]
    flats = [row.expand(3000).clone() for row in rows]
    run(connected, listed("halving", flats, 2, connected, by_node=True))
    assert len(flats[0].unique()) == 1
    for wire in connected:
        wire.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 5, 8, 12])
def test_bytes_are_those_of_a_ring_and_all_are_counted(world_size: int, way: str) -> None:
    numel = 16 * world_size * 10
    for rank in range(world_size):
        flat, made = torch.zeros(numel), Operations()
        sums = WAYS[way](flat, Grid.even(world_size, 1, rank), even_bounds(numel, world_size), True)
        sums.reduce(made, 0, ())
        sums.gather(made, 1)
        sent = [0] * world_size
        for operation in made.array:
            if operation.kind == 1:
                sent[operation.peer] += operation.arguments[0]
        assert sent == sums.bytes_to and sum(sent) == 2 * (world_size - 1) * flat.nbytes // world_size


@pytest.mark.parametrize("shard_bytes", [2**16, 130_048, 2**18, 2**19, 3 * 2**20, 2**24])
def test_pieces_of_a_ring_are_whole_packets(shard_bytes: int) -> None:
    """A packet of the kernel has at most 64 KiB with all headers, in segments of 1448 bytes. A message that is a little longer
    takes two, one of them nearly empty."""
    world_size, header = 4, 16
    flat, made = torch.zeros(world_size * shard_bytes // 4), Operations()
    bounds = even_bounds(flat.numel(), world_size)
    RingSum(flat, Grid.even(world_size, 1, 0), bounds, True).reduce(made, 0, ())
    sent = [operation.arguments[0] for operation in made.array if operation.kind == 1]
    of_shard = sent[: len(sent) // (world_size - 1)]
    assert sum(of_shard) == shard_bytes
    *whole, last = of_shard
    packet = 2**16 // 1448 * 1448
    for piece in whole:
        packets = -(-(piece + header) // packet)
        assert packets >= 2 and piece > 0.9 * packets * packet
    assert 0 < last <= max(whole, default=2 * packet)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 12, 13])
def test_shards_belong_to_ranks_in_order_unless_nodes_matter(world_size: int) -> None:
    bounds = list(range(world_size + 1))
    owned = []
    for rank in range(world_size):
        stages = stages_of(Grid.even(1, world_size, rank), bounds, nearest_first=False)
        place, edges = stages[-1].place, stages[-1].edges
        assert edges[place : place + 2] == (rank, rank + 1)
        nearest = stages_of(Grid.even(1, world_size, rank), bounds, nearest_first=True)
        owned.append(nearest[-1].edges[nearest[-1].place])
        assert {rank in stage.group for stage in [*stages, *nearest]} == {True}
    assert sorted(owned) == bounds[:-1]


def test_ranks_of_a_node_exchange_the_long_ranges() -> None:
    grid = Grid.of(["x", "y", "y", "x"], rank=3)
    first, second = stages_of(grid, [0, 10, 20, 30, 40], nearest_first=True)
    assert first.group == (0, 3) and set(second.group) == {3, 2}
    lengths = [end - start for stage in (first, second) for start, end in pairwise(stage.edges)]
    assert lengths == [20, 20, 10, 10]


def test_large_shards_go_around_a_ring_between_nodes() -> None:
    large, small = torch.zeros(8 * 2**14), torch.zeros(8 * 2**14 - 8)
    peers = {}
    for name, flat, grid in (
        ("ring", large, Grid.even(8, 1, 0)),
        ("small", small, Grid.even(8, 1, 0)),
        ("one node", large, Grid.even(1, 8, 0)),
    ):
        sent = WireSum(flat, grid, even_bounds(flat.numel(), 8)).bytes_to
        peers[name] = [rank for rank, nbytes in enumerate(sent) if nbytes]
    assert peers == {"ring": [1], "small": [1, 2, 4], "one node": [1, 2, 4]}


def test_a_list_follows_memory_that_moved() -> None:
    flat = torch.ones(100)
    made = WireSum(flat, Grid.even(1, 2, 0), even_bounds(100, 2))
    first = made.operations((0, 1), 4, ())
    assert made.operations((0, 1), 4, ()) is first is not made.operations((0, 1), 5, ())
    memory = torch.zeros(100).untyped_storage()
    for alias in AllReduce(flat, Grid.even(1, 2, 0)).aliases:
        alias.set_(memory, alias.storage_offset(), alias.shape, alias.stride())  # type: ignore[call-overload]
    moved = made.operations((0, 1), 5, ())
    assert moved is made.operations((0, 1), 5, ())
    low, high = memory.data_ptr(), memory.data_ptr() + 400
    places = [operation.target for operation in moved.array if operation.target]
    assert places and all(low <= place < high for place in places)


def test_what_the_kernels_do_not_add_stays_with_the_backend() -> None:
    assert can_sum(torch.zeros(1)) and not can_sum(torch.zeros(1, dtype=torch.float64))
    assert not can_sum(torch.zeros(1, device="meta"))


def test_the_backend_sums_without_a_wire_and_what_kernels_do_not_add() -> None:
    class Backend:
        streams, wire, pinned = Streams(), None, None

        def all_reduce(self, flat: torch.Tensor) -> None:
            raise OSError("asked")

    link: Any = Backend()
    connected = wires(2)
    for dtype, wire in ((torch.float32, None), (torch.float64, None), (torch.float64, connected[0])):
        link.wire = wire
        with pytest.raises(LinkError, match="asked"):
            AllReduce(torch.zeros(5, dtype=dtype), Grid.even(1, 2, 0)).run(0, link, Meter(), None)
    for each in connected:
        each.close()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("shared", [False, True])
def test_a_list_keeps_no_use_of_the_buffer(ranks: int, shared: bool) -> None:
    """A use that is left makes the engine believe that a script holds a part of the buffer: it would move it in each step."""
    for rank in range(ranks):
        flat = torch.zeros(1000)
        sums = WireSum(flat, Grid.even(1, ranks, rank), even_bounds(1000, ranks))
        before = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
        sums.operations((0, 1), 0, range(ranks) if shared else ())
        assert torch._C._storage_Use_Count(flat.untyped_storage()._cdata) == before
