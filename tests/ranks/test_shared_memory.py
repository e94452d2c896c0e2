"""Ranks of a node whose messages pass through memory: the bits of TCP, what happens where memory is refused, and what is left of
it when ranks are killed."""

import contextlib
import errno
import gc
import logging
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Outcome, World, Worlds, digest

import gradwire as gw
from gradwire.core import SHARED_MEMORY
from gradwire.transport import sharing
from gradwire.transport.rings import Handles, Rings, memory_bytes, ring_bytes

TIMEOUT_S = 20.0
COMPRESSED = gw.ErrorFeedback(gw.QSGD(bits=4))
PLANS: dict[str, Any] = {
    "exact": gw.Identity(),
    "4 bits": COMPRESSED,
    "4 bits, pipelined": gw.Policy(default=COMPRESSED, schedule=gw.Pipelined()),
    "exact, sharded": gw.Policy(default=gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)),
}
MORE_THAN_A_RING = ring_bytes(2)  # of float32


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What is said of memory."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    sharing.log.addHandler(handler)
    sharing.log.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        sharing.log.removeHandler(handler)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def shared_with(handle: Any) -> list[list[int]]:
    """By lane the ranks with which this one shares memory."""
    wires = [lane.link.wire for lane in handle.session.lanes.data]
    return [wire.shared_with if wire is not None else [] for wire in wires]


def train(plan: Any, sizes: list[int], switch: str = "on", nodes: str = "") -> tuple[str, list[list[int]], list[str]]:
    """A few steps. A digest of the weights, the ranks with which memory is shared, and what was said. `nodes`: of each rank."""
    rank = dist.get_rank()
    node = {"GROUP_RANK": nodes[rank], "LOCAL_WORLD_SIZE": "2"} if nodes else {}
    torch.manual_seed(0)
    model = Given(sizes)
    with told() as heard, environment(**{SHARED_MEMORY: switch}, **node):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, plan=plan)
    for step in range(4):
        model(model.random_gradients(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    shares = shared_with(handle)
    handle.detach()
    return digest(model.parameters()), shares, heard


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bits_are_those_of_tcp(worlds: Worlds, world_size: int, plan: str) -> None:
    sizes = [30_000, 7, MORE_THAN_A_RING if "exact" in plan else 50_000]
    by_memory = worlds.run(world_size, train, PLANS[plan], sizes)
    by_tcp = worlds.run(world_size, train, PLANS[plan], sizes, "off")
    for weights, shares, heard in by_memory:
        assert weights == by_memory[0][0] and not heard
        assert [len(lane) for lane in shares] == 2 * [world_size - 1]
    if plan != "exact" or world_size == 2:  # a backend's sum of more ranks has another order
        assert by_memory[0][0] == by_tcp[0][0]
    assert all(shares == [[], []] for _, shares, _ in by_tcp)
    assert [len(heard) for *_, heard in by_tcp] == [1, *[0] * (world_size - 1)]
    (words,) = by_tcp[0][2]
    assert words.startswith("INFO: ranks") and f"rank 1: {SHARED_MEMORY} is off" in words


def summed(dtype: torch.dtype) -> tuple[str, bool]:
    """The digest of a mean over ranks by all-reduce; and whether that is the mean to rounding."""
    size, rank = dist.get_world_size(), dist.get_rank()
    terms = [torch.randn(4097, generator=torch.Generator().manual_seed(of)).to(dtype) for of in range(size)]
    mine = terms[rank].clone()
    exchange = gw.Exchange({"gradient": mine}, plan=gw.Identity())
    assert all(len(lane.link.wire.shared_with) == size - 1 for lane in exchange.lanes.data)
    exchange.average_()
    exchange.close()
    expected = torch.stack([term.double() for term in terms]).mean(0)
    return digest([mine]), torch.allclose(mine.double(), expected, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exact_sum_is_the_same_on_all_ranks(worlds: Worlds, world_size: int, dtype: torch.dtype) -> None:
    ends = worlds.run(world_size, summed, dtype)
    assert len({digest for digest, _ in ends}) == 1 and all(right for _, right in ends)


def test_ranks_share_memory_inside_their_node_alone(worlds: Worlds) -> None:
    mixed = worlds.run(4, train, COMPRESSED, [3000, 20], "on", "0101")
    assert [shares for _, shares, _ in mixed] == [[[2], [2]], [[3], [3]], [[0], [0]], [[1], [1]]]
    by_tcp = worlds.run(4, train, COMPRESSED, [3000, 20], "off", "0101")
    assert [weights for weights, *_ in mixed] == [weights for weights, *_ in by_tcp]


def refused(word: str) -> str:
    with environment(**{SHARED_MEMORY: word if dist.get_rank() == 1 else "on"}), pytest.raises(gw.CommunicationError) as error:
        gw.parallelize(Given([3000]), plan=COMPRESSED)
    return str(error.value)


def test_a_word_that_is_neither_on_nor_off_is_told_on_all_ranks(worlds: Worlds) -> None:
    for words in worlds.run(2, refused, "OFF"):
        assert f"no rank begins, since rank 1 says: {SHARED_MEMORY} is 'OFF', which is neither on nor off" in words


def test_nobody_changes_the_size_of_the_memory() -> None:
    handles = Handles.make(ring_bytes(2))
    for size in (0, 2 * memory_bytes(ring_bytes(2))):
        with pytest.raises(PermissionError):
            os.ftruncate(handles.memory, size)
    Rings(handles, True, ring_bytes(2)).close()
    unsealed = Handles(os.memfd_create("gradwire", os.MFD_ALLOW_SEALING), (os.eventfd(0), os.eventfd(0)))
    os.ftruncate(unsealed.memory, memory_bytes(ring_bytes(2)))
    with pytest.raises(OSError, match="not sealed"):
        Rings(unsealed, False, ring_bytes(2))
    unsealed.close()


def held() -> int:
    """What this process has open or mapped of memory for rings, and of bells."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(each))
    open_here = sum("memfd:gradwire" in link or "[eventfd]" in link for link in links)
    return open_here + Path("/proc/self/maps").read_text().count("memfd:gradwire")


def refuse(how: str, refuser: int) -> tuple[str, list[list[int]], list[str], int]:
    """A rank gets no memory for the wires of its node; the other node does. Also what is left of the memory."""
    limits, make, give = resource.getrlimit(resource.RLIMIT_FSIZE), sharing.Handles.make, sharing.MemoryOffer.give
    mapped, before, user_of = 0, held(), sharing._user_of

    def give_nobody(offer: Any, cards: Any, apart: range) -> None:
        give(offer, [card | {"address": b"\0nobody".hex()} for card in cards], apart)

    def map_one(*arguments: Any) -> Rings:
        nonlocal mapped
        if mapped == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        mapped += 1
        return Rings(*arguments)

    if dist.get_rank() == refuser:
        if how == "too little memory":
            resource.setrlimit(resource.RLIMIT_FSIZE, (memory_bytes(ring_bytes(2)) - 1, limits[1]))
        elif how == "another network":
            sharing.MemoryOffer.give = give_nobody  # type: ignore[method-assign]
        elif how == "too few addresses":
            sharing.Rings = map_one  # type: ignore[assignment, misc]
        elif how == "another user":
            sharing._user_of = lambda connection: 12345
        elif how == "no such call":
            sharing.Handles.make = staticmethod(lambda capacity: os.no_such_call())  # type: ignore[attr-defined, method-assign]
    try:
        ended = train(COMPRESSED, [3000, 20], "on", "0011")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sharing.Handles.make = staticmethod(make)  # type: ignore[method-assign]
        sharing.MemoryOffer.give = give  # type: ignore[method-assign]
        sharing.Rings, sharing._user_of = Rings, user_of  # type: ignore[misc]
    gc.collect()
    return *ended, held() - before


@pytest.mark.parametrize(
    ("how", "refuser"),
    [
        *(("too little memory", 3), ("another network", 3), ("no such call", 3), ("another user", 3)),
        *(("too few addresses", 3), ("too few addresses", 2)),
    ],
)
def test_a_node_without_memory_uses_tcp_and_says_why(worlds: Worlds, how: str, refuser: int) -> None:
    ends = worlds.run(4, refuse, how, refuser)
    assert [shares for _, shares, *_ in ends] == [[[1], [1]], [[0], [0]], [[], []], [[], []]]
    assert len({weights for weights, *_ in ends}) == 1
    assert [len(heard) for *_, heard, _ in ends] == [0, 0, 1, 0]
    assert [left for *_, left in ends] == [0, 0, 0, 0]
    (words,) = ends[2][2]
    told = f"WARNING: ranks 2, 3 share a machine and no memory, so their messages go by TCP: rank {refuser}: "
    assert words.startswith(told) and words.endswith(f". TCP takes longer. {SHARED_MEMORY}=off keeps this quiet."), words
    if how == "another network":
        assert "Connection refused by the Unix socket of rank 2. Ranks share memory inside one network namespace" in words
    if how == "another user":
        assert "rank 2 is a process of user 12345, and this one of user" in words
    if how == "too little memory":
        need = "File too large. The 2 ranks of this node need 4.0 MiB of shared memory (2.0 MiB for each of 2 pairs"
        assert need in words


def die_while_memory_is_given() -> tuple[str, int]:
    """Rank 2 is killed when ranks give each other memory. The error, and what is left of the memory."""
    before, give = held(), sharing.MemoryOffer.give

    def killed(offer: Any, cards: Any, apart: range) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 2:
        sharing.MemoryOffer.give = killed  # type: ignore[method-assign]
    try:
        with pytest.raises(gw.CommunicationError) as error:
            gw.parallelize(Given([3000]), plan=COMPRESSED)
    finally:
        sharing.MemoryOffer.give = give  # type: ignore[method-assign]
    words = str(error.value)
    del error
    gc.collect()
    return words, held() - before


def test_a_rank_that_dies_while_memory_is_given_is_told(worlds: Worlds) -> None:
    with World(3, TIMEOUT_S) as world:
        world.start(die_while_memory_is_given)
        outcomes = world.collect(40, needed={0, 1})
    for rank in (0, 1):
        assert outcomes[rank].kind == "returned", outcomes[rank].value
        words, left = outcomes[rank].value
        assert "one died" in words and left == 0


def wait_and_break_off() -> tuple[str, float, float]:
    """Rank 0 waits for rank 1, which comes later, until another thread breaks the lanes off. The error, the seconds until it
    came, and the seconds of the processor while it waited."""
    model = Given([3000, 20])
    handle = gw.parallelize(model, plan=COMPRESSED)
    model(model.random_gradients(0)).backward()
    if dist.get_rank() == 1:
        dist.barrier()
        with pytest.raises(gw.CommunicationError):
            model(model.random_gradients(1)).backward()
        handle.detach()
        return "", 0.0, 0.0
    links, ended = [lane.link for lane in handle.session.lanes.data], [0.0, 0.0]

    def break_off() -> None:
        began = time.process_time()
        time.sleep(1.0)
        ended[:] = time.monotonic(), time.process_time() - began
        for link in links:
            link.break_off()

    thread = threading.Thread(target=break_off)
    thread.start()
    with pytest.raises(gw.CommunicationError) as error:
        model(model.random_gradients(1)).backward()
    told_after = time.monotonic() - ended[0]
    thread.join()
    dist.barrier()
    handle.detach()
    return str(error.value), told_after, ended[1]


def test_a_wait_takes_no_processor_and_another_thread_can_end_it(worlds: Worlds) -> None:
    (words, told_after_s, busy_s), _ = worlds.run(2, wait_and_break_off)
    assert "rank 0 waited for bucket 0" in words
    assert told_after_s < 20.0 and busy_s < 0.5


# ---- nothing is left


def memories(process: str) -> set[int]:
    """The inodes of memory of rings that a process has mapped, or open. Of none where it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        found = {int(inode) for inode in re.findall(r"(\d+) +/memfd:gradwire", Path(f"/proc/{process}/maps").read_text())}
        found |= {each.stat().st_ino for each in Path(f"/proc/{process}/fd").iterdir() if "memfd:gradwire" in os.readlink(each)}
    return found


class Survivor(NamedTuple):
    """What a rank told that was not killed."""

    shared: set[int]
    """The memory that it shared."""
    words: str
    seconds: float
    """From the begin of the step to the error."""
    left: int
    """What it had left of memory and bells."""


def trained_until_killed(plan: Any, after_s: dict[int, float]) -> Survivor:
    """Train until the victims kill themselves, somewhere in a step; each leaves a forked process behind."""
    before = held()
    model, rank = Given([200_000, 7]), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=plan)
    shared, gradients = memories("self"), model.random_gradients(rank)
    if rank in after_s:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.1)
            time.sleep(4.0)  # so long it is there when the test looks who has memory
            os._exit(0)
        threading.Timer(after_s[rank], lambda: os.kill(parent, signal.SIGKILL)).start()
    began = first = time.monotonic()
    try:
        while began - first < 30:
            began = time.monotonic()
            model(gradients).backward()
            optimizer.step()
            optimizer.zero_grad()
    except gw.CommunicationError as error:
        seconds = time.monotonic() - began
        words = str(error)
        del error
        handle.detach()
        del handle, optimizer, model
        gc.collect()
        return Survivor(shared, words, seconds, held() - before)
    raise AssertionError("nobody noticed that a rank was killed")


def kill_often(worlds_made: int, at_once: int, ranks: int, seed: int) -> None:
    """Kills all ranks but one of each world, one soon after another."""
    chance, before = random.Random(seed), set(os.listdir("/dev/shm"))
    plans = [PLANS[name] for name in sorted(PLANS)]
    for first in range(0, worlds_made, at_once):
        worlds = [World(ranks, TIMEOUT_S) for _ in range(at_once)]
        try:
            survivors, shared = [], set()
            for number, world in enumerate(worlds, first):
                survivors.append(number % ranks)
                victims = [rank for rank in range(ranks) if rank != number % ranks]
                begin = chance.uniform(0.02, 0.2)
                after_s = {victim: begin + place * chance.choice([0.0, 0.001, 0.02]) for place, victim in enumerate(victims)}
                world.start(trained_until_killed, plans[number % len(plans)], after_s)
            for survivor, world in zip(survivors, worlds, strict=True):
                outcomes = world.collect(40)
                assert outcomes[survivor].kind == "returned", outcomes[survivor].value
                told = Survivor(*outcomes[survivor].value)
                victims = [str(rank) for rank in range(ranks) if rank != survivor]
                assert all(outcomes[int(victim)] == Outcome("died", "exit code -9") for victim in victims)
                named = ", ".join(re.findall(r"ranks? ([\d, ]+?)(?= did not answer|, which may be busy)", told.words))
                assert set(named.split(", ")) & set(victims), told.words
                assert told.seconds < TIMEOUT_S and told.left == 0, told
                assert len(told.shared) == 2 * (ranks - 1)
                shared |= told.shared
            left = {pid for pid in os.listdir("/proc") if pid.isdigit() and memories(pid) & shared}
            assert not left, f"after {first + at_once} worlds processes {left} have memory of rings"
        finally:
            for world in worlds:
                world.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "gradwire" in name]


def test_killed_ranks_leave_no_memory() -> None:
    kill_often(8, 8, ranks=2, seed=1)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_hundred_killed_ranks_leave_no_memory() -> None:
    """Each survivor names a rank that was killed, in time. Two hundred in `make test-all`, else forty."""
    kill_often(50 if "GRADWIRE_ALL_CASES" in os.environ else 10, 10, ranks=5, seed=2)
