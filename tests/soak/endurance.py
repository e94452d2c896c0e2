"""Thousands of steps: ranks stay equal bit for bit, memory stays flat, and nothing is left afterwards."""

import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from worlds import Given, World, digest, gradwire_threads

import gradwire as gw
from soak.training import PLANS, threads_and_files

SIZES = (40_000, 300, 7, 9_000, 1)
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Endurance:
    """What the ranks of one long run found, the worst of them."""

    plan: str
    ranks: int
    steps: int
    compared: int
    """How often weights were compared; equal each time."""
    memory_growth: float
    """Resident memory of the last quarter over that of the second, less 1."""
    threads_left: int
    files_left: int
    """Open files, sockets among them, more than before."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.memory_growth <= 0.01 and self.threads_left <= 0 and self.files_left <= 0


def endure(plan: str, ranks: int, steps: int) -> Endurance:
    """Run it; raises AssertionError where ranks differ."""
    started = time.monotonic()
    with World(ranks, 60.0) as world:
        found = world.run(go_on, plan, steps, deadline_s=60 + steps * 0.2)
    compared, growth, threads, files = zip(*found, strict=True)
    return Endurance(
        plan, ranks, steps, min(compared), max(growth), max(threads), max(files), time.monotonic() - started
    )


def go_on(plan: str, steps: int) -> tuple[int, float, int, int]:
    """(comparisons, memory growth, threads left, files left) of this rank."""
    train(plan, 20, every=10)  # what is loaded once is not counted
    gc.collect()
    before = threads_and_files()
    compared, memory = train(plan, steps, every=max(1, steps // 40))
    gc.collect()
    deadline = time.monotonic() + 5
    while threads_and_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    files, threads = (now - then for now, then in zip(threads_and_files(), before, strict=True))
    assert not gradwire_threads()
    quarter = len(memory) // 4
    growth = statistics.mean(memory[-quarter:]) / statistics.mean(memory[quarter : 2 * quarter]) - 1
    return compared, growth, threads, files


def train(plan: str, steps: int, every: int) -> tuple[int, list[int]]:
    """How often weights were compared, and the resident bytes at each time."""
    torch.manual_seed(dist.get_rank())
    model = Given(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = gw.parallelize(model, optimizer, plan=PLANS[plan], drift_check_steps=1000)
    memory: list[int] = []
    for step in range(steps):
        optimizer.zero_grad()
        model(model.random_gradients(step % 50, dist.get_rank())).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            own, everybody = digest(model.parameters()), [None] * dist.get_world_size()
            dist.all_gather_object(everybody, own)
            assert set(everybody) == {own}, f"after step {step + 1} weights differ: {everybody}"
            gc.collect()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
    handle.detach()
    return len(memory), memory
