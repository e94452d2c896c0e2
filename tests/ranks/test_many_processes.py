"""Many ranks that are light processes: forked, with a store and no process group."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_many_ranks import LonelyGroup, gradient
from worlds import CONTEXT

import gradwire as gw
from gradwire.bench.ranks import die_with
from gradwire.transport import Group

VICTIM = 17


def as_processes(size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 200.0) -> dict[int, Any]:
    """What the function returned on each rank that lives."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    made = [CONTEXT.Process(target=live_as, args=(r, size, store.port, pipes[r][1], function, arguments)) for r in range(size)]
    found: dict[int, Any] = {}
    try:
        for process, (_, theirs) in zip(made, pipes, strict=True):
            process.start()
            theirs.close()
        until, left = time.monotonic() + limit_s, {ours: rank for rank, (ours, _) in enumerate(pipes)}
        while left and (ready := multiprocessing.connection.wait([*left], max(0.0, until - time.monotonic()))):
            for ours in ready:
                rank = left.pop(ours)  # type: ignore[arg-type]
                try:
                    found[rank] = ours.recv()  # type: ignore[union-attr]
                except EOFError:
                    continue
        assert not left, f"ranks {sorted(left.values())} are silent; the others said {found}"
    finally:
        for process in made:
            process.kill()
        for process in made:
            process.join(10)
    return found


def live_as(rank: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: Any) -> None:
    die_with(os.getppid())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.PrefixStore("ranks", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    pipe.send(function(LonelyGroup.of_store(store, rank, size, timedelta(seconds=60)), *arguments))
    pipe.close()
    threading.Event().wait()  # until the test ends all: a rank that leaves is another story


def trained_until_one_is_killed(group: Group) -> tuple[tuple[int, ...], str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    values = {"first": gradient(group.rank), "second": gradient(group.rank + 100)}
    exchange = gw.Exchange(values, gw.QSGD(bits=4), group)
    try:
        for step in range(10**6):
            if group.rank == VICTIM and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if group.rank % 5 == 0 and step == 3:
                time.sleep(1.0)  # busy with something else: innocent
            exchange.average_(values)
    except gw.CommunicationError as error:
        return error.ranks, str(error)
    return (), "nothing"


@pytest.mark.parametrize("size", [20, pytest.param(48, marks=pytest.mark.slow)])
def test_one_that_is_killed_is_named_by_all_and_nobody_else_is(size: int) -> None:
    """Under a limit of 256 descriptors."""
    found = as_processes(size, trained_until_one_is_killed)
    assert sorted(found) == [rank for rank in range(size) if rank != VICTIM]
    assert {ranks for ranks, _ in found.values()} == {(VICTIM,)}, found


def with_few_descriptors(group: Group, limit: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        gw.Exchange({"values": gradient(group.rank)}, gw.QSGD(bits=4), group)
    except gw.CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("size", "limit"), [(20, 128), pytest.param(32, 144, marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_ranks_with_few_descriptors_say_how_many_they_need(size: int, limit: int) -> None:
    found = as_processes(size, with_few_descriptors, limit)
    assert len(found) == size
    for words in found.values():
        assert "connections to other ranks need" in words and f"the limit is {limit}. Raise it to at least" in words, words
