"""Wires: lists of operations that C++ runs on connections between threads of one process."""

import ctypes
import gc
import os
import queue
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ring_fuzz
import torch
from fake_links import wires as pairs

from gradwire.collectives import Add, Transfer, Transfers
from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.compressors.mixed_precision import BesideCompressor
from gradwire.core.payload import RAW
from gradwire.core.specs import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    Cast,
    ErrorFeedback,
    Int8,
    Natural,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    TopK,
    TwoBit,
)
from gradwire.errors import PayloadError
from gradwire.kernels import cpu
from gradwire.kernels.segments import Segment, Segments
from gradwire.transport import Meter
from gradwire.transport.link import Link
from gradwire.transport.operations import Operations
from gradwire.transport.rings import ring_bytes
from gradwire.transport.tls import EncryptedSocket
from gradwire.transport.wire import DamagedError, LinkError, Wire

RING_BYTES = ring_bytes(2)
pytestmark = pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")

Wires = Callable[..., list[Wire]]


@pytest.fixture(params=[{}, {"shared": True}, {"tls": True}], ids=["TCP", "shared memory", "TLS"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    """wires(world_size): one for each rank, all in this process."""
    made: list[Wire] = []

    def connect(world_size: int, timeout_s: float = 10.0) -> list[Wire]:
        made.extend(connected := pairs(world_size, timeout_s, **request.param))
        return connected

    yield connect
    for wire in made:
        wire.close()


def run_all(wires: list[Wire], lists: list[Operations]) -> list[Meter]:
    meters = [Meter(spans=[]) for _ in wires]
    with ThreadPoolExecutor(len(wires)) as pool:
        done = [pool.submit(*each) for each in zip([wire.run for wire in wires], lists, meters, strict=True)]
    for each in done:
        each.result()
    return meters


@pytest.mark.parametrize("numel", [1, 1000, 10_000_000], ids=["a byte", "little", "more than the connection holds"])
def test_messages_pass_in_both_directions_at_once(wires: Wires, numel: int) -> None:
    world_size = 3
    sent = [torch.randint(0, 256, (numel,), dtype=torch.uint8) for _ in range(world_size)]
    received = [[torch.zeros_like(each) for each in sent] for _ in range(world_size)]
    lists = []
    for rank in range(world_size):
        operations = Operations()
        others = [other for other in range(world_size) if other != rank]
        for other in others:
            operations.send(other, sent[rank], 5)
        for other in others:
            operations.receive(other, received[rank][other], 5)
        operations.flush()
        lists.append(operations)
    connected = wires(world_size)
    for _ in range(2):
        run_all(connected, lists)
        for rank, parts in enumerate(received):
            for other, part in enumerate(parts):
                assert other == rank or torch.equal(part, sent[other])
                part.zero_()


def test_a_run_costs_its_peers_and_not_all_ranks() -> None:
    """Processor time of empty lists: of thousands of ranks as of two."""
    us = []
    for world_size in (2, 8192):
        wire, nothing, times = Wire(world_size, {}, timeout_s=10.0), Operations(), []
        for _ in range(300):
            began = time.thread_time_ns()
            wire.run(nothing, Meter())
            times.append((time.thread_time_ns() - began) / 1e3)
        us.append(min(times))
        wire.close()
    assert us[1] < 10 * us[0], us


def test_parts_are_awaited_in_any_order_of_ranks_and_in_the_order_of_each_rank(wires: Wires) -> None:
    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    first, second, total = numbers(1, 2), numbers(10, 20), numbers(0, 0)
    sender, adder = Operations(), Operations()
    arrived, later = torch.zeros(2), torch.zeros(2)
    sender.send(1, first, 1)
    sender.send(1, second, 2)
    sender.flush()
    adder.receive(0, arrived, 1)
    adder.call([cpu.call("copy_into", total, arrived)])
    adder.receive(0, later, 2)
    adder.call([cpu.call("add_into", total, later)])
    meters = run_all(wires(2), [sender, adder])
    assert total.tolist() == [11, 22]
    assert meters[1].codec_seconds > 0 == meters[0].codec_seconds
    assert len(meters[1].spans or []) == 2 and not meters[0].spans


def test_what_arrives_where_something_was_sent_from_is_sent_as_it_is_now(wires: Wires) -> None:
    """A checksum is of the bytes that leave, not of those that left from there before."""
    part, back, again = torch.arange(9.0), torch.zeros(9), torch.zeros(9)
    first, second = Operations(), Operations()
    first.send(1, part, 1)
    first.flush()
    first.receive(1, part, 2)
    first.send(1, part, 3)
    first.flush()
    second.receive(0, back, 1)
    second.call([cpu.call("add_into", back, back)])
    second.send(0, back, 2)
    second.receive(0, again, 3)
    second.flush()
    run_all(wires(2), [first, second])
    assert torch.equal(again, 2 * torch.arange(9.0))


def test_what_is_sent_on_as_it_came_has_the_checksum_of_who_sent_it_first(wires: Wires) -> None:
    """So memory that changes in between is told at the next rank."""
    part, held, back = torch.arange(9.0), torch.zeros(9), torch.zeros(9)
    long = torch.zeros(10_000_000, dtype=torch.uint8)
    sender, middle, reader = Operations(), Operations(), Operations()
    sender.send(1, part, 1)
    sender.flush()
    middle.send(0, long, 2)
    middle.receive(0, held, 1)
    middle.flush()  # waits for the reader
    middle.send(0, held, 3)
    middle.flush()
    reader.receive(1, long.clone(), 2)
    reader.receive(1, back, 3)
    ends, thread = wires(2), queue.SimpleQueue[int]()

    def run_middle() -> None:
        thread.put(threading.get_native_id())
        ends[1].run(middle, Meter())

    with ThreadPoolExecutor(1) as pool:
        running, stat = pool.submit(run_middle), Path(f"/proc/self/task/{thread.get()}/stat")
        ends[0].run(sender, Meter())
        while not torch.equal(held, part) or stat.read_text().rpartition(") ")[2][0] != "S":
            time.sleep(0.001)
        held[4] = 7.0
        with pytest.raises(DamagedError, match="the checksum of 36 bytes"):
            ends[0].run(reader, Meter())
        running.result()


def test_elements_come_with_their_header() -> None:
    """In one call of the kernel. What is left of a record that a call does not take is lost."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = [Wire(2, {1: near}, 10.0), Wire(2, {0: far}, 10.0)]
    part, total = torch.arange(9.0), torch.ones(9)
    sender, adder = Operations(), Operations()
    sender.send(1, part, 1)
    sender.flush()
    adder.receive_elements(0, total, 1, add=True)
    for wire, operations in zip(ends, (sender, adder), strict=True):
        wire.run(operations, Meter())
    assert torch.equal(total, part + 1)
    for wire in ends:
        wire.close()


def test_elements_of_another_message_are_not_used(wires: Wires) -> None:
    total, sender, adder = torch.ones(9), Operations(), Operations()
    sender.send(1, torch.arange(9.0), 1)
    sender.flush()
    adder.receive_elements(0, total, 2, add=True)
    ends = wires(2)
    ends[0].run(sender, Meter())
    with pytest.raises(LinkError, match="36 bytes with tag 1 came where one of 36 bytes with tag 2 was expected"):
        ends[1].run(adder, Meter())
    assert torch.equal(total, torch.ones(9))


def test_another_list_than_the_peers_is_told(wires: Wires) -> None:
    part = torch.zeros(8)
    lists = [Operations(), Operations()]
    for rank, tag in enumerate((3, 4)):
        lists[rank].send(1 - rank, part, tag)
        lists[rank].receive(1 - rank, part.clone(), tag)
    with pytest.raises(LinkError, match="tag 4 came where one of 32 bytes with tag 3 was expected") as error:
        run_all(wires(2), lists)
    assert error.value.peer == 1


@pytest.mark.parametrize("options", [{"tcp": True}, {"shared": True}, {"tcp": True, "tls": True}], ids=["tcp", "memory", "tls"])
def test_a_message_too_short_to_wake_who_waits_is_told_before_the_timeout(options: dict[str, bool]) -> None:
    waiting, sending = connected = pairs(2, 60.0, **options)
    long, short = Operations(), Operations()
    long.receive(1, torch.zeros(2**20, dtype=torch.uint8), 1)
    short.send(0, torch.zeros(100, dtype=torch.uint8), 2)
    short.flush()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(waiting.run, long, Meter())
        time.sleep(0.1)
        sending.run(short, Meter())
        try:
            with pytest.raises(LinkError, match="100 bytes with tag 2 came where one of 1048576 bytes with tag 1 was expected"):
                running.result(timeout=30)
        finally:
            waiting.shut_down()
    for wire in connected:
        wire.close()


def test_a_connection_whose_descriptor_is_gone_is_told(wires: Wires) -> None:
    waits = Operations()
    waits.receive(1, torch.zeros(8), 0)
    waiting = wires(2, timeout_s=2.0)[0]
    number, waiting._connections[1].fd = waiting._connections[1].fd, 2**20 - 1
    with pytest.raises(LinkError, match="Bad file descriptor"):
        waiting.run(waits, Meter())
    waiting._connections[1].fd = number


def test_a_peer_that_is_gone_silent_or_shut_down_is_named(wires: Wires) -> None:
    waits = Operations()
    waits.receive(1, torch.zeros(8), 0)
    gone, _ = (pair := wires(2))
    pair[1].close()
    with pytest.raises(LinkError, match="closed by peer") as error:
        gone.run(waits, Meter())
    assert error.value.peer == 1
    silent = wires(2, timeout_s=0.2)[0]
    with pytest.raises(LinkError, match="Timed out waiting"):
        silent.run(waits, Meter())
    waiting = wires(2)[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(waiting.run, waits, Meter())
        time.sleep(0.1)
        waiting.shut_down()
        with pytest.raises(LinkError):
            running.result(timeout=30)


def test_a_kernel_that_refuses_ends_the_list(wires: Wires) -> None:
    operations = Operations()
    operations.call([cpu.call("add_into", torch.zeros(3), torch.zeros(4))])
    with pytest.raises(RuntimeError, match="as long as its sum"):
        wires(2)[0].run(operations, Meter())


def test_a_damaged_payload_is_told(wires: Wires) -> None:
    codec, segments = compressor_for(TopK(0.1)), Segments.of([Segment(0, 1000, 11, 0, 0)])
    payload = torch.full((codec.payload_bytes(segments, torch.float32),), 255, dtype=torch.uint8)
    operations = Operations()
    context = Context(torch.tensor([1, 2, 3, 4]))
    calls = codec.decode_calls(payload, segments, torch.float32, True, torch.zeros(1000), context)
    operations.call(cpu.call(*each) for each in calls)
    with pytest.raises(PayloadError, match="indices are damaged"):
        wires(2)[0].run(operations, Meter())


def test_a_child_closes_its_copies(wires: Wires) -> None:
    """Or the workers of a DataLoader would keep the connections of a killed rank open."""
    wire, peer = wires(2)
    number = wire._connections[1].fd
    if (pid := os.fork()) == 0:
        try:
            os.fstat(number)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.fstat(number) and peer


# ---- memory alone


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    """Of two ranks that share memory."""
    low, high = pairs(2, 10.0, shared=True)
    yield low, high
    low.close()
    high.close()


def sends(to: int, part: torch.Tensor) -> Operations:
    operations = Operations()
    operations.send(to, part, 1)
    operations.flush()
    return operations


def receives(source: int, part: torch.Tensor) -> Operations:
    operations = Operations()
    operations.receive(source, part, 1)
    return operations


def test_messages_end_anywhere_in_a_ring(pair: tuple[Wire, Wire]) -> None:
    low, high = pair
    for numel in [RING_BYTES - 16, 1, RING_BYTES // 2 + 7, RING_BYTES // 3, RING_BYTES - 17, 5, 3 * RING_BYTES + 1]:
        part = torch.randint(0, 256, (numel,), dtype=torch.uint8)
        arrived = torch.zeros_like(part)
        run_all([low, high], [sends(1, part), receives(0, arrived)])
        assert torch.equal(arrived, part)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"tls": True}], ids=["tcp", "memory", "tls"])
@pytest.mark.parametrize("into", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_copied_and_added_as_they_arrive(dtype: torch.dtype, into: torch.dtype, options: dict[str, bool]) -> None:
    """Wherever a ring or a step of it ends, also in the middle of an element."""
    torch.manual_seed(0)
    low, high = pairs(2, 10.0, capacity=70_016, **options)
    try:
        for numel in (1, 7, 123, 4097, 100_003):
            terms = [torch.randn(numel).to(dtype) for _ in range(3)]
            odd = torch.zeros(numel % 3, dtype=torch.uint8)
            total, expected = torch.full((numel,), 7.0).to(into), torch.zeros(numel, dtype=into)
            sends, adds = Operations(), Operations()
            for number, term in enumerate(terms):
                sends.send(1, term, number)
                adds.receive_elements(0, total, number, add=number > 0, dtype=dtype)
                name = "add_into" if number else "copy_into"
                cpu.run([cpu.call(name, expected, term)])
                if odd.numel():
                    sends.send(1, odd, 9)
                    adds.receive(0, torch.ones_like(odd), 9)
            sends.flush()
            run_all([low, high], [sends, adds])
            assert torch.equal(total, expected)
    finally:
        low.close()
        high.close()


def test_a_part_that_is_sent_on_is_kept() -> None:
    """Where anything else needs a part than the sum to which it is added, it arrives in its buffer."""
    nothing, part = torch.zeros(0), torch.arange(5.0)
    totals, buffers = [torch.ones(5) for _ in range(3)], [torch.zeros(5) for _ in range(3)]
    kinds, links, schemes = [], pairs(3, 10.0, shared=True), []
    for rank in range(3):
        first, second = (Transfer.empty([], 3, nothing) for _ in range(2))
        if rank == 0:
            first.sent[1] = part
        elif rank == 1:
            first.received[0], second.sent[2] = buffers[1], buffers[1]
            first.arrivals[0] = [Add(totals[1], buffers[1])]
        else:
            second.received[1] = buffers[2]
            second.arrivals[1] = [Add(totals[2], buffers[2])]
        scheme = Transfers([[first, second]], rank, 3)
        scheme.runs_in_c, scheme.aliases = True, [totals[rank]]
        schemes.append(scheme)
        kinds.append([operation.kind for operation in scheme._operations(0, links[rank]).array])
    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(scheme.run, 0, SimpleNamespace(wire=wire), Meter(), None)  # type: ignore[arg-type]
            for scheme, wire in zip(schemes, links, strict=True)
        ]:
            done.result()
    assert torch.equal(totals[1], 1 + part) and torch.equal(totals[2], 1 + part)
    assert torch.equal(buffers[1], part) and not buffers[2].any()
    assert [4 in each for each in kinds] == [False, False, True]
    for wire in links:
        wire.close()


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"tls": True}], ids=["tcp", "memory", "tls"])
def test_elements_wait_for_their_turn(options: dict[str, bool]) -> None:
    """The sum of three ranks has one order, whoever is first; and who waits for its turn takes no processor."""
    connected = pairs(3, 10.0, **options)
    terms = [torch.tensor([2.0**24]), torch.ones(1), torch.ones(1)]
    adder, senders = Operations(), [Operations(), Operations()]
    total = terms[2].clone()
    for source in (0, 1):
        adder.receive_elements(source, total, 0, add=True)
        senders[source].send(2, terms[source], 0)
        senders[source].flush()
    with ThreadPoolExecutor(1) as pool:
        connected[1].run(senders[1], Meter())
        running = pool.submit(connected[2].run, adder, Meter())
        began = time.process_time()
        time.sleep(0.5)
        assert not running.done() and time.process_time() - began < 0.1
        connected[0].run(senders[0], Meter())
        running.result(timeout=30)
    assert total.item() == 2.0**24  # of ones first it would be 2 more
    for wire in connected:
        wire.close()


def on_the_way(wire: Wire, peer: int) -> socket.socket:
    """The connection under an encrypted one."""
    encrypted = wire._sockets[peer]
    assert isinstance(encrypted, EncryptedSocket)
    return encrypted._connection


def test_nothing_of_an_encrypted_message_is_readable() -> None:
    low, high = pairs(2, tls=True)
    part = torch.tensor([*b"weights of the model " * 40], dtype=torch.uint8)
    low.run(sends(1, part), Meter())
    raw = on_the_way(high, 0).recv(5000, socket.MSG_PEEK)
    assert len(raw) > part.numel()
    assert b"weights" not in raw
    received = torch.zeros_like(part)
    high.run(receives(0, received), Meter())
    assert torch.equal(received, part)
    for wire in (low, high):
        wire.close()


@pytest.mark.parametrize("place", [30, 200, -1])
def test_a_change_of_encrypted_bytes_is_damage(place: int) -> None:
    low, high = pairs(2, tls=True)
    low.run(sends(1, torch.arange(100.0)), Meter())
    raw = bytearray(on_the_way(high, 0).recv(5000))
    raw[place] ^= 1
    on_the_way(low, 1).sendall(raw)
    with pytest.raises(DamagedError, match="bad record mac"):
        high.run(receives(0, torch.zeros(100)), Meter())
    for wire in (low, high):
        wire.close()


def test_damaged_elements_that_come_by_tcp_are_told() -> None:
    low, high = pairs(2)
    part = torch.arange(25.0)
    low.run(sends(1, part), Meter())
    raw = bytearray(high._sockets[0].recv(1000))
    raw[16 + 37] ^= 4
    low._sockets[1].sendall(raw)
    operations = Operations()
    operations.receive_elements(0, torch.zeros(25), 1, add=True)
    with pytest.raises(DamagedError, match="the checksum of 100 bytes"):
        high.run(operations, Meter())
    low.close()
    high.close()


def test_damaged_elements_are_told(pair: tuple[Wire, Wire]) -> None:
    low, high = pair
    low.run(sends(1, torch.arange(25.0)), Meter())
    (ctypes.c_ubyte * 200).from_address(high._connections[0].into + 128)[16 + 37] ^= 4
    operations = Operations()
    operations.receive_elements(0, torch.zeros(25), 1, add=True)
    with pytest.raises(DamagedError, match="the checksum of 100 bytes"):
        high.run(operations, Meter())


@pytest.mark.parametrize("word", [0, 8, 64, 72], ids=["written", "reader wakes", "read", "writer wakes"])
def test_whatever_a_ring_says_nothing_outside_it_is_touched(pair: tuple[Wire, Wire], word: int) -> None:
    """A rank that writes nonsense into the head of a ring: the other one fails, or gets what was sent."""
    low, high = pair
    low._timeout_s = high._timeout_s = 0.2
    part, arrived = torch.arange(5000.0), torch.zeros(5000)
    for value in (1, RING_BYTES - 1, RING_BYTES + 1, 2**63 - 5, 2**64 - 1):
        for ring in (low._connections[1].out, low._connections[1].into):
            ctypes.c_uint64.from_address(ring + word).value = value
        with suppress(LinkError):
            run_all([low, high], [sends(1, part), receives(0, arrived)])
            assert torch.equal(arrived, part)


@pytest.mark.parametrize("seed", range(40))
def test_messages_and_sums_of_any_size_through_rings_of_any_capacity(seed: int) -> None:
    """What `make fuzz` and `make fuzz-threads` do under sanitizers."""
    assert ring_fuzz.one_round(random.Random(seed), 2 + seed % 3) in ("", "broken off")


def test_a_bit_that_changes_in_memory_is_told(pair: tuple[Wire, Wire]) -> None:
    low, high = pair
    part = torch.arange(100, dtype=torch.uint8)
    low.run(sends(1, part), Meter())
    (ctypes.c_ubyte * 200).from_address(high._connections[0].into + 128)[16 + 37] ^= 4
    with pytest.raises(DamagedError, match="the checksum of 100 bytes") as error:
        high.run(receives(0, torch.zeros_like(part)), Meter())
    assert error.value.peer == 0


def test_nothing_is_sent_after_a_shut_down(pair: tuple[Wire, Wire]) -> None:
    """The ring has room for a message that nobody will read."""
    low, high = pair
    low.shut_down()
    with pytest.raises(LinkError, match="shut down") as error:
        low.run(sends(1, torch.zeros(8)), Meter())
    assert error.value.peer == 1
    with pytest.raises(LinkError, match="closed by peer"):
        high.run(receives(0, torch.zeros(8)), Meter())


def test_what_was_sent_before_the_end_arrives(pair: tuple[Wire, Wire]) -> None:
    low, high = pair
    part, arrived = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    low.run(sends(1, part), Meter())
    low.close()
    high.run(receives(0, arrived), Meter())
    assert torch.equal(arrived, part)


def test_a_child_lets_go_of_memory_and_bells(pair: tuple[Wire, Wire]) -> None:
    numbers = [each.bell for wire, peer in zip(pair, (1, 0), strict=True) for each in [wire._connections[peer]]]
    assert Path("/proc/self/maps").read_text().count("memfd:gradwire") >= 2
    if (pid := os.fork()) == 0:
        left = "memfd:gradwire" in Path("/proc/self/maps").read_text()
        for number in numbers:
            with suppress(OSError):
                os.fstat(number)
                left = True
        os._exit(int(left))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(os.fstat(number) for number in numbers)


def test_a_wire_that_is_forgotten_leaves_nothing() -> None:
    def open_here() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = open_here()
    low, high = pairs(2, 10.0, shared=True)
    assert open_here() == before + 2 * 4  # of each: a connection, two bells, and the memory
    low.close()
    high.close()
    assert open_here() == before
    low, high = pairs(2, 10.0, shared=True)
    for wire in (low, high):
        for connection in wire._sockets.values():
            connection.close()
    del wire, low, high
    gc.collect()
    assert open_here() == before


def test_memory_that_a_stuck_thread_may_touch_is_kept_to_the_end() -> None:
    low, high = pairs(2, 10.0, shared=True)
    link: Any = SimpleNamespace(wire=low)
    Link.abandon(link)
    kept = weakref.ref(low)
    del low, link
    gc.collect()
    wire = kept()
    assert wire is not None
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(wire))
    wire.close()
    high.close()


# ---- calls


@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_and_sums_are_torchs(wires: Wires, dtype: torch.dtype, into_dtype: torch.dtype) -> None:
    source, into = torch.randn(1001).to(dtype), torch.randn(1001).to(into_dtype)
    copied, added = torch.empty_like(into), into.clone()
    operations = Operations()
    operations.call([cpu.call("copy_into", copied, source), cpu.call("add_into", added, source)])
    wires(1)[0].run(operations, Meter())
    assert torch.equal(copied, torch.empty_like(into).copy_(source))
    assert torch.equal(added, into.add_(source.float()))


SPECS = [
    QSGD(bits=4),
    QSGD(bits=3, levels="exponential"),
    Int8(),
    FP8(),
    Natural(),
    TernGrad(),
    TwoBit(),
    Cast("bfloat16"),
]
SPECS += [TopK(0.1), BlockTopK(0.1), DGC(0.1), SignSGD(), Signum(), ErrorFeedback(QSGD(bits=2))]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside vectors"])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_calls_do_what_the_compressor_does(wires: Wires, spec: Spec, dtype: torch.dtype, beside: bool) -> None:
    if beside and not spec.carries_uncompressed:
        pytest.skip("its payloads carry no vectors")
    codec = compressor_for(spec)
    bits = spec.element_bits
    rows = [Segment(0, 2000, 11, 0, bits), Segment(2000, 37, 12, 0, RAW), Segment(2037, 700, 13, 0, bits)]
    if not beside:
        rows[1] = rows[1]._replace(bits=bits)
    segments = Segments.of(rows)
    if beside:
        codec = BesideCompressor(codec)
    assert codec.runs_in_c
    context = Context(torch.tensor([1, 2, 3, 4]))
    source = torch.randn(2737).to(dtype)
    state = [[torch.randn(2737) for _ in codec.state]]
    state.append([each.clone() for each in state[0]])
    size = codec.payload_bytes(segments, dtype)
    payloads = torch.zeros(2, size, dtype=torch.uint8)
    own = [payloads[0].clone(), payloads[1].clone()]
    sums = [torch.ones(2737), torch.ones(2737)]
    codec.encode(source, state[0], segments, context, own[0])
    codec.decode(own[0], segments, dtype, True, sums[0], context)
    operations = Operations()
    calls = codec.encode_calls(source, state[1], segments, context, own[1])
    calls += codec.decode_calls(own[1], segments, dtype, True, sums[1], context)
    operations.call(cpu.call(*each) for each in calls)
    wires(1)[0].run(operations, Meter())
    assert torch.equal(*own) and torch.equal(*sums)
    assert all(torch.equal(*each) for each in zip(*state, strict=True))


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a tensor"):
        cpu.call("copy_into", torch.zeros(1), 3)
    with pytest.raises(ValueError, match="zip"):
        cpu.call("copy_into", torch.zeros(1))
