"""1, 2, 4 and 8 ranks on one GPU whose payloads travel through the host's memory: bits of CPU ranks, equal weights, faults.

The ranks' group is gloo, so their lanes are host-staged. On a CPU the lanes are made host-staged too: then the copies are copies
in the host's memory. The world of 2 ends with faults: a flipped bit, which all ranks report, and a killed rank, whose name rank 0
reports.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

import gradwire as gw
from benchmarks.gpu.findings import DIFFERS, PASSED, Job
from benchmarks.gpu.kernels import differing, largest_difference, outcome_of
from benchmarks.gpu.ranks import Rank, alike, means, rank_main, run_worlds
from benchmarks.gpu.training import PLANS, SUMS, init_group
from gradwire.transport import Group, Streams, rendezvous, staged_link

WORLDS = {1: 0.5, 2: 1.5, 4: 1.5, 8: 3.0}
"""Numbers of ranks, and their shares of the section's time."""
WITH_FAULTS = 2
"""The ranks of the world that ends with faults."""
STEPS = 6
"""Steps of a training in which a fault comes."""


@contextmanager
def staged_on_cpu() -> Iterator[None]:
    """Lanes for tensors of a CPU are host-staged inside."""
    with (
        mock.patch.object(Group, "stages", lambda self, device: True),
        mock.patch.object(staged_link, "DeviceStreams", lambda device: Streams()),
    ):
        yield


def staged(device: str) -> Any:
    """Lanes for tensors of this device are host-staged inside."""
    return staged_on_cpu() if device == "cpu" else nullcontext()


def exchange(job: Job, name: str, own: Rank) -> tuple[str, dict[str, Any]]:
    """Compare one plan's means through the host with those of CPU ranks."""
    began = time.perf_counter()
    with staged(job.device):
        found = means(PLANS[name], own.rank, job.device)
    took = round(time.perf_counter() - began, 2)
    other = means(PLANS[name], own.rank, "cpu")
    equal = alike(list(found.values()))
    differ = {key: differing(value, other[key]) for key, value in found.items()}
    relative = {key: largest_difference(value, other[key]) for key, value in found.items()}
    outcome = outcome_of(differ, relative, name in SUMS)
    return (outcome if equal else DIFFERS), {"differ": differ, "relative": relative, "equal_on_ranks": equal, "s": took}


def until_told(device: str, at_step: int, act: Any) -> gw.CommunicationError:
    """Train, and call `act` with the handle in one step. Returns the error that a later step, or this one, raised."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 3)).to(device)
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    try:
        for step in range(STEPS):
            if step == at_step:
                act(handle)
            model.zero_grad()
            model(torch.ones(5, 300, device=device)).square().sum().backward()
    except gw.CommunicationError as error:
        return error
    finally:
        handle.detach()
    raise RuntimeError("no rank reported the fault")


class Flipping:
    """A backend that flips one bit of the next message."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._changed = backend, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        if self._changed is None:
            tensors = self._changed = [each.clone() for each in tensors]
            tensors[0].view(torch.uint8)[tensors[0].nbytes // 2] ^= 4
        return self._backend.send(tensors, to, tag)


def flipped(own: Rank) -> tuple[str, dict[str, Any]]:
    """Rank 0 flips a bit of a payload behind its checksum. All ranks must report it."""

    def flip(handle: gw.Handle) -> None:
        if own.rank == 0:
            link = handle.session.lanes.data[0].link
            link.backend = Flipping(link.backend)

    # wires have their checksum in C++, where nothing can come between: messages of Python have the same one
    with mock.patch.object(rendezvous, "why_no_wires", lambda: "a bit is flipped in messages of Python"):
        error = until_told(own.job.device, 2, flip)
    named = list(error.ranks) == [1 - own.rank] and error.step == 2
    return PASSED if named else DIFFERS, {"reported": str(error)[:300], "ranks": list(error.ranks)}


def killed(own: Rank) -> tuple[str, dict[str, Any]]:
    """Rank 1 is killed. Rank 0 must report its name."""

    def kill(handle: gw.Handle) -> None:
        if own.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.perf_counter()
    error = until_told(own.job.device, 2, kill)
    named = list(error.ranks) == [1] and error.bucket is not None
    took = round(time.perf_counter() - began, 2)
    return PASSED if named else DIFFERS, {"reported": str(error)[:300], "ranks": list(error.ranks), "s": took}


def through_host(own: Rank, port: int) -> None:
    """All findings of one rank."""
    init_group(own.job.device, own.rank, own.world_size, port, nccl=False)
    for name in PLANS:
        own.found(f"exchange, {name}", partial(exchange, own.job, name, own))
    with ExitStack() as stack:
        stack.enter_context(staged(own.job.device))
        for name in ("Identity", "4 bits"):
            own.found(f"training, {name}", partial(own.training, name))
        if own.world_size == WITH_FAULTS:
            own.found("a flipped bit", partial(flipped, own))
            own.found("a killed rank", partial(killed, own))


def run(job: Job) -> None:
    run_worlds(job, WORLDS, {WITH_FAULTS: (1,)})


if __name__ == "__main__":
    rank_main(through_host)
