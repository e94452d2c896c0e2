"""Ranks of a node whose messages pass through memory: the bits of TCP, what happens where memory is refused, and what is left of
it when ranks are killed."""

import contextlib
import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Given, World, Worlds, digest

import gradwire as gw
from gradwire.collectives.rings import RING_BYTES
from gradwire.exchange import sharing
from gradwire.exchange.sharing import SWITCH

TIMEOUT_S = 20.0
COMPRESSED = gw.ErrorFeedback(gw.QSGD(bits=4))
PLANS: dict[str, Any] = {
    "4 bits": COMPRESSED,
    "4 bits, pipelined": gw.Policy(default=COMPRESSED, schedule=gw.Pipelined()),
    "exact, sharded": gw.Policy(default=gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)),
}
MORE_THAN_A_RING = RING_BYTES  # of float32


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
    with told() as heard, environment(**{SWITCH: switch}, **node):
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
    for rank, (weights, shares, heard) in enumerate(by_memory):
        assert shares == 2 * [[other for other in range(world_size) if other != rank]] and not heard
        assert weights == by_tcp[rank][0] == by_memory[0][0]
    assert all(shares == [[], []] for _, shares, _ in by_tcp)
    assert [len(heard) for *_, heard in by_tcp] == [1, *[0] * (world_size - 1)]
    (words,) = by_tcp[0][2]
    assert words.startswith("INFO: ranks") and f"rank 1: {SWITCH} is off" in words


def test_ranks_share_memory_inside_their_node_alone(worlds: Worlds) -> None:
    mixed = worlds.run(4, train, COMPRESSED, [3000, 20], "on", "0101")
    assert [shares for _, shares, _ in mixed] == [[[2], [2]], [[3], [3]], [[0], [0]], [[1], [1]]]
    by_tcp = worlds.run(4, train, COMPRESSED, [3000, 20], "off", "0101")
    assert [weights for weights, *_ in mixed] == [weights for weights, *_ in by_tcp]


def refuse(how: str) -> tuple[str, list[list[int]], list[str]]:
    """Rank 3 gets no memory for the wires of its node; the other node does."""
    limits, make, give = resource.getrlimit(resource.RLIMIT_FSIZE), sharing.Handles.make, sharing.MemoryOffer.give

    def give_nobody(offer: Any, cards: Any) -> None:
        give(offer, [card | {"address": b"\0nobody".hex()} for card in cards])

    if dist.get_rank() == 3 and how == "too little memory":
        resource.setrlimit(resource.RLIMIT_FSIZE, (RING_BYTES, limits[1]))
    elif dist.get_rank() == 3 and how == "another network":
        sharing.MemoryOffer.give = give_nobody  # type: ignore[method-assign]
    elif dist.get_rank() == 3 and how == "no such call":
        sharing.Handles.make = staticmethod(lambda: os.no_such_call())  # type: ignore[attr-defined, method-assign]
    try:
        return train(COMPRESSED, [3000, 20], "on", "0011")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sharing.Handles.make = staticmethod(make)  # type: ignore[method-assign]
        sharing.MemoryOffer.give = give  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["too little memory", "another network", "no such call"])
def test_a_node_without_memory_uses_tcp_and_says_why(worlds: Worlds, how: str) -> None:
    ends = worlds.run(4, refuse, how)
    assert [shares for _, shares, _ in ends] == [[[1], [1]], [[0], [0]], [[], []], [[], []]]
    assert len({weights for weights, *_ in ends}) == 1
    assert [len(heard) for *_, heard in ends] == [0, 0, 1, 0]
    (words,) = ends[2][2]
    assert words.startswith("WARNING: ranks (2, 3) share a node and no memory, so their messages go by TCP: rank 3:"), (
        words
    )
    if how == "too little memory":
        assert (
            "File too large. The 2 ranks of this node need 4.0 MiB of shared memory (2.0 MiB for each of 2 pairs"
            in words
        )


def wait_and_break_off() -> tuple[str, float, float]:
    """Rank 1 computes; rank 0 waits for it, until another thread breaks the lanes off. The error, the seconds until it came, and
    the seconds of the processor while it waited."""
    model = Given([3000, 20])
    handle = gw.parallelize(model, plan=COMPRESSED)
    model(model.random_gradients(0)).backward()
    if dist.get_rank() == 1:
        time.sleep(2.5)
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
    handle.detach()
    return str(error.value), told_after, ended[1]


def test_a_wait_takes_no_processor_and_another_thread_can_end_it(worlds: Worlds) -> None:
    (words, told_after_s, busy_s), _ = worlds.run(2, wait_and_break_off)
    assert "rank 0 waited for bucket 0" in words
    assert told_after_s < 5.0 and busy_s < 0.5


# ---- nothing is left


def memories(process: str) -> set[int]:
    """The inodes of memory of rings that a process has mapped, or open. Of none where it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        found = {
            int(inode) for inode in re.findall(r"(\d+) +/memfd:gradwire", Path(f"/proc/{process}/maps").read_text())
        }
        found |= {
            each.stat().st_ino
            for each in Path(f"/proc/{process}/fd").iterdir()
            if "memfd:gradwire" in os.readlink(each)
        }
    return found


def trained_until_killed(victim: int, after_s: float) -> tuple[set[int], str]:
    """Train until the victim kills itself, somewhere in a step; it leaves a forked process behind. The memory that was shared,
    and the error."""
    model = Given([200_000, 7])
    handle = gw.parallelize(model, plan=COMPRESSED)
    shared = memories("self")
    rank = dist.get_rank()
    gradients = model.random_gradients(rank)
    model(gradients).backward()
    if rank == victim:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < 15:
            model.zero_grad()
            model(gradients).backward()
    except gw.CommunicationError as error:
        handle.detach()
        return shared, str(error)
    raise AssertionError("nobody noticed that a rank was killed")


def kill_often(kills: int, at_once: int = 5) -> None:
    before = set(os.listdir("/dev/shm"))
    for first in range(0, kills, at_once):
        worlds = {number: World(2, TIMEOUT_S) for number in range(first, first + at_once)}
        try:
            for number, world in worlds.items():
                world.start(trained_until_killed, number % 2, 0.02 + 0.003 * (number % 7))
            shared: set[int] = set()
            for number, world in worlds.items():
                victim = number % 2
                outcome = world.collect(40, needed={1 - victim})[1 - victim]
                assert outcome.kind == "returned", outcome.value
                memory, words = outcome.value
                assert len(memory) == 2 and f"rank {victim}" in words
                shared |= memory
            left = {pid for pid in os.listdir("/proc") if pid.isdigit() and memories(pid) & shared}
            assert not left, f"after kill {first + at_once} processes {left} have memory of rings"
        finally:
            for world in worlds.values():
                world.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "gradwire" in name]


def test_killed_ranks_leave_no_memory() -> None:
    kill_often(20)


@pytest.mark.slow
def test_many_killed_ranks_leave_no_memory() -> None:
    kill_often(200)
