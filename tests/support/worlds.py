"""Worlds: real ranks, each a process on loopback, for tests of what ranks do together.

A test sends a module-level function to all ranks of a world and gets back what each returned:

    first, second = worlds.run(2, function, argument)

Worlds are made when first asked for and live as long as the test session. One that fails or hangs is killed, and the
next test gets another. Ranks are forked from a server that has loaded torch, which takes milliseconds, not seconds.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.bench.ranks import die_with

__all__ = ["Given", "Outcome", "Place", "World", "Worlds", "digest", "gradwire_threads", "seeded"]

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "gradwire.api", "numpy", "pytest", "hypothesis"]
CONTEXT.set_forkserver_preload(PRELOADED)
FRAMEWORKS = forkserver.ForkServer()
"""Another server, whose ranks have those frameworks loaded that are installed: each takes a rank seconds."""
FRAMEWORKS.set_forkserver_preload([*PRELOADED, "accelerate", "transformers.trainer", "transformers.models.gpt2", "lightning"])


@dataclass(frozen=True)
class Outcome:
    """The end of a job on one rank."""

    kind: str
    """returned, raised, died (its process is gone) or silent (it did not answer in time)."""
    value: Any
    """The returned value; for other ends, a text that describes the end."""


@dataclass(frozen=True)
class Place:
    """The network place of a rank."""

    namespace: str = ""
    """The file of a network namespace; '' for that of the tests."""
    interface: str = "lo"
    address: str = "127.0.0.1"

    def enter(self) -> None:
        """Move this thread there, before there are others."""
        if self.namespace:
            with open(self.namespace) as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


class World:
    """`size` processes that have initialised torch.distributed together, rank 0 being the host of the store."""

    def __init__(
        self, size: int, group_timeout_s: float = 60.0, places: Sequence[Place] | None = None, frameworks: bool = False
    ) -> None:
        """`places`: where each rank lives; None for all on loopback. frameworks: whether ranks have them loaded."""
        self.size = size
        places = places or [Place()] * size
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-world-")
        self._logs = [Path(self._folder.name) / f"rank{rank}" for rank in range(size)]
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [
            CONTEXT.Process(target=_live, args=(rank, places, group_timeout_s, theirs, str(log)), daemon=True)
            for rank, ((_, theirs), log) in enumerate(zip(pipes, self._logs, strict=True))
        ]
        server = FRAMEWORKS.connect_to_new_process if frameworks else forkserver.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", server):
            for process, (_, theirs) in zip(self.processes, pipes, strict=True):
                process.start()
                theirs.close()
        port = self._pipes[0].recv() if self._pipes[0].poll(60) else None
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Send a job to every rank."""
        job = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)

    def collect(self, deadline_s: float = 60.0, needed: Iterable[int] | None = None) -> list[Outcome]:
        """Return the end of the job on every rank, or at least on the ranks that are needed.

        Ranks that are silent at the deadline report where they are, and are killed.
        """
        deadline = time.monotonic() + deadline_s
        outcomes: dict[int, Outcome] = {}
        awaited = set(range(self.size) if needed is None else needed)
        while not awaited <= outcomes.keys():
            open_pipes = [self._pipes[rank] for rank in range(self.size) if rank not in outcomes]
            answered = connection.wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            for pipe in answered:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = Outcome(*pickle.loads(self._pipes[rank].recv_bytes()))
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    outcomes[rank] = Outcome("died", f"exit code {self.processes[rank].exitcode}")
                if outcomes[rank].kind != "returned" and needed is None:
                    deadline = min(deadline, time.monotonic() + 15)  # the others may wait for this one
        for rank in awaited - outcomes.keys():
            outcomes[rank] = Outcome("silent", self._where(rank))
        return [outcomes.get(rank) or Outcome("silent", "it was not waited for") for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> list[Any]:
        """Start, collect, and give what the ranks returned. Anything else kills the world and fails."""
        try:
            self.start(function, *arguments)
            outcomes = self.collect(deadline_s)
        except BaseException:
            self.close()
            raise
        if any(outcome.kind != "returned" for outcome in outcomes):
            self.close()
            described = "\n".join(
                f"---- rank {rank} {outcome.kind}: {outcome.value if outcome.kind != 'returned' else ''}"
                for rank, outcome in enumerate(outcomes)
            )
            raise AssertionError(f"{function.__name__} in a world of {self.size}:\n{described}")
        return [outcome.value for outcome in outcomes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End all processes, stopped ones too."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._folder.cleanup()

    def _where(self, rank: int) -> str:
        process = self.processes[rank]
        if not process.is_alive() or process.pid is None:
            return "its process is gone"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        where = self._logs[rank].read_text() if self._logs[rank].exists() else "it never came up"
        process.kill()
        return f"it was here:\n{where}"


class Worlds:
    """One world of each size, made when first asked for."""

    def __init__(self, frameworks: bool = False) -> None:
        """frameworks: whether ranks have them loaded."""
        self._kept: dict[int, World] = {}
        self._frameworks = frameworks

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> list[Any]:
        """Run `function(*arguments)` on every rank of the world of this size; what each returned, rank by rank."""
        world = self._kept.get(size)
        if world is None or not world.alive:
            world = self._kept[size] = World(size, frameworks=self._frameworks)
        try:
            return world.run(function, *arguments, deadline_s=deadline_s)
        except BaseException:
            self._kept.pop(size).close()
            raise

    def close(self) -> None:
        for world in self._kept.values():
            world.close()
        self._kept.clear()


def _live(rank: int, places: Sequence[Place], timeout_s: float, pipe: connection.Connection, log: str) -> None:
    """A rank's life: come up, then do jobs until the pipe closes, or until the tests are killed."""
    die_with(os.getppid())
    gc.freeze()  # what was loaded stays: without this each collection looks at 300,000 objects, 0.2 s
    with Path(log).open("w") as trace:
        faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
        places[rank].enter()
        torch.set_num_threads(1)
        port = 0 if rank == 0 else pipe.recv()
        # coming up may take longer than the group's timeout on a busy machine
        host, size, most = places[0].address, len(places), timedelta(seconds=60)
        store = dist.TCPStore(host, port, size, rank == 0, most, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=most)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        while True:
            try:
                function, arguments = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)  # the test session is gone; nothing here may wait for other ranks
            outcome = pickle.dumps(_do(function, arguments, grace_s=min(timeout_s, 10.0) + 1.0))
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(outcome)


def _do(function: Callable[..., Any], arguments: tuple[Any, ...], grace_s: float) -> tuple[str, Any]:
    try:
        value = function(*arguments)
    except BaseException:
        return "raised", traceback.format_exc()
    _destroy_groups()
    gc.collect()
    deadline = time.monotonic() + grace_s  # a thread that waits for a rank that failed ends with its collective
    while (left := gradwire_threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()  # what that thread held becomes garbage then
    return ("raised", f"it left threads:\n{_where_threads_are()}") if left else ("returned", value)


def _destroy_groups() -> None:
    """End the groups that the function made: a thread of each gloo group wakes a hundred times a second."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in _of_meshes:
            dist.destroy_process_group(group)


_of_meshes: set[dist.ProcessGroup] = set()
"""The groups of `mesh_of`, which stay: DTensor keeps what it knows of a mesh, and takes an equal one for the same."""


@functools.cache
def mesh_of(between: int, inside: int) -> Any:
    """The mesh of so many nodes of so many ranks each; the same for all functions of a process."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (between, inside), mesh_dim_names=("between", "inside"))
    _of_meshes.update(mesh.get_all_groups())
    return mesh


def _where_threads_are() -> str:
    """The last lines of each thread of gradwire's."""
    frames = sys._current_frames()
    ours = [each for each in threading.enumerate() if each.name.startswith("gradwire") and each.ident in frames]
    return "\n".join(f"{each.name}:\n{''.join(traceback.format_stack(frames[each.ident or 0])[-3:])}" for each in ours)


# ---- for the functions that run on ranks


def gradwire_threads() -> list[str]:
    """Names of the threads that gradwire has running in this process.

    Not the one that calls the roll after a failure: while the store's host is stopped it waits for it, a daemon.
    """
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("gradwire") and name != "gradwire-roll-call"]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the bytes: equal only for tensors that are equal bit for bit."""
    sha = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        sha.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def seeded(*words: int) -> torch.Generator:
    """A random generator that depends on these numbers alone."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:7], "little"))


class Given(torch.nn.Module):
    """Parameters whose gradients the test chooses: the loss is the sum of parameter times gradient.

    Called with None in place of a gradient it leaves that parameter out of the graph.
    """

    def __init__(self, sizes: Iterable[int], dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        """`seed`: of the values; None: they are drawn from torch's random state."""
        super().__init__()
        generator = None if seed is None else seeded(seed)
        for index, size in enumerate(sizes):
            values = torch.randn(size, generator=generator)
            self.register_parameter(f"p{index}", torch.nn.Parameter(values.to(dtype)))

    def forward(self, gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g).sum().float() for p, g in pairs if g is not None]).sum()

    def random_gradients(self, *words: int) -> list[torch.Tensor]:
        """Normal gradients, another draw for every sequence of words."""
        generator = seeded(*words)
        return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters()]

    def mean_of(self, gradients: Callable[[int], list[torch.Tensor]], world_size: int) -> Iterator[torch.Tensor]:
        """The true mean over ranks, in float64."""
        for column in zip(*(gradients(rank) for rank in range(world_size)), strict=True):
            yield torch.stack([each.double() for each in column]).mean(0)
