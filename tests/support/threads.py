"""Threads: ranks of one process, for tests of what ranks do together that need no sockets.

A test sends a function to all ranks, as it would to a world, and gets back what each returned:

    first, second = threads.run(2, function, argument)

The function asks `here` for its rank, and passes `here.group` to what it makes. It runs on the processes of a world as well. What
belongs to a process must not be used: the default group, the random state (see `built`), environment variables.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from worlds import gradwire_threads

from gradwire.transport import Group
from gradwire.transport.in_process import InProcessGroup, run_ranks

__all__ = ["Threads", "built", "here"]

T = TypeVar("T")

_GRACE_S = 11.0
"""For lanes that end with a handle or an exchange that was dropped."""


class Here(threading.local):
    """The rank that runs the present code: a thread, or a process of a world."""

    def __init__(self) -> None:
        self.thread: InProcessGroup | None = None

    @property
    def group(self) -> Group:
        """The group of all ranks, to pass as `process_group`."""
        return self.thread or Group.of(None)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank. Collective."""
        if self.thread is not None:
            return self.thread.gather(value)
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place. Collective."""
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))

    @contextmanager
    def on_node(self, name: str) -> Iterator[None]:
        """Inside, this rank says that it is on the node of this name."""
        before = self.thread
        if before is not None:
            self.thread = replace(before, node=name)
        else:
            os.environ.update(GROUP_RANK=name, LOCAL_WORLD_SIZE="1")
        try:
            yield
        finally:
            self.thread = before
            if before is None:
                del os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"]


here = Here()

_RANDOM = threading.Lock()


def built(seed: int, make: Callable[[], T]) -> T:
    """What `make` returns when torch's random state begins with this seed: one rank after another, since they share it."""
    with _RANDOM:
        torch.manual_seed(seed)
        return make()


class Threads:
    """Runs functions on ranks that are threads. `run` is that of `Worlds`."""

    def __init__(self) -> None:
        import_module("torch._dynamo")  # the first optimizer loads it, and no other thread may meet it half loaded
        gc.freeze()  # what was loaded stays: without this each collection looks at it

    def close(self) -> None:
        gc.unfreeze()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> list[Any]:
        """Run `function(*arguments)` on every rank; what each returned, rank by rank."""
        before = threading.active_count()
        results = run_ranks(size, partial(_live, function), *arguments, timeout_s=deadline_s)
        deadline = time.monotonic() + _GRACE_S
        gc.collect()
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()  # what a lane held becomes garbage when it ends
        assert threading.active_count() <= before, f"it left threads: {gradwire_threads()}"
        return results


def _live(function: Callable[..., Any], group: InProcessGroup, *arguments: Any) -> Any:
    here.thread = group
    return function(*arguments)
