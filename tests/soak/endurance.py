"""Thousands of steps under auto: ranks stay equal bit for bit, memory stays flat, and nothing is left afterwards."""

import ctypes
import gc
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from worlds import World, digest, gradwire_threads, seeded

import gradwire as gw
from soak.training import threads_and_files

PAGE = os.sysconf("SC_PAGE_SIZE")
DRIFT_CHECK_STEPS = 100
RANKS = 2
LOOKS = 20
"""At the memory in a run, or one every 1,000 steps where that is more."""
WARM_UP = 5
"""Looks that do not count: allocators fill their lists."""
NEIGHBOURS = 3
"""The smallest of so many looks counts: buffers of a probe of links come and go."""
MOST_GROWTH = 1_000_000
"""Bytes from the first looks that count to the last ones."""
MOST_GROWTH_OF_SHORT_RUNS = 4_000_000
"""Some 4,000 steps fill what keeps the last steps: a run without 20 looks of 1,000 steps grows by 0.5 KB a step."""


@dataclass(frozen=True)
class Endurance:
    """What the ranks of one long run found, the worst of them."""

    ranks: int
    steps: int
    drift_checks: int
    """How often ranks compared their weights by checksums; they were equal each time."""
    compared: int
    """How often all weights were compared from outside; equal each time."""
    decisions: int
    """How often auto decided."""
    memory_growth_bytes: int
    """Resident memory at the end, over that after the warm-up."""
    threads_left: int
    files_left: int
    """Open files, sockets among them, more than before."""
    seconds: float

    @property
    def passed(self) -> bool:
        most = MOST_GROWTH if self.steps >= 1000 * LOOKS else MOST_GROWTH_OF_SHORT_RUNS
        return self.memory_growth_bytes < most and self.threads_left <= 0 and self.files_left <= 0


def endure(steps: int) -> Endurance:
    """Run it; raises AssertionError where ranks differ."""
    started = time.monotonic()
    with World(RANKS, 60.0) as world:
        found = world.run(go_on, steps, deadline_s=120 + steps * 0.02)
    compared, decisions, growth, threads, files = zip(*found, strict=True)
    return Endurance(
        RANKS,
        steps,
        steps // DRIFT_CHECK_STEPS,
        min(compared),
        max(decisions),
        max(growth),
        max(threads),
        max(files),
        time.monotonic() - started,
    )


def go_on(steps: int) -> tuple[int, int, int, int, int]:
    """(comparisons, decisions, growth of memory in bytes, threads left, files left) of this rank."""
    train(40)  # what is loaded once is not counted
    gc.collect()
    before = threads_and_files()
    compared, decisions, memory = train(steps)
    gc.collect()
    deadline = time.monotonic() + 5
    while threads_and_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    files, threads = (now - then for now, then in zip(threads_and_files(), before, strict=True))
    assert not gradwire_threads()
    counted = memory[WARM_UP:]
    growth = min(counted[-NEIGHBOURS:]) - min(counted[:NEIGHBOURS])
    return compared, decisions, growth, threads, files


def train(steps: int) -> tuple[int, int, list[int]]:
    """How often weights were compared, auto's decisions, and the resident bytes at each look."""
    torch.manual_seed(dist.get_rank())
    logging.getLogger("gradwire").setLevel(logging.WARNING)  # not what auto decides
    model = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = gw.parallelize(model, optimizer, drift_check_steps=DRIFT_CHECK_STEPS)
    batches = [torch.randn(4, 20, generator=seeded(dist.get_rank(), number)) for number in range(50)]
    compared, memory = 0, list[int]()
    measured_every = max(1, min(1000, steps // LOOKS))
    for step in range(steps):
        optimizer.zero_grad()
        (model(batches[step % 50]) - 1).square().mean().backward()
        optimizer.step()
        if (step + 1) % measured_every == 0:
            own, everybody = digest(model.parameters()), [None] * dist.get_world_size()
            dist.all_gather_object(everybody, own)
            assert set(everybody) == {own}, f"after step {step + 1} weights differ: {everybody}"
            compared += 1
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # of the only heap: see main
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
    decisions = handle.stats().decided
    handle.detach()
    return compared, decisions, memory
