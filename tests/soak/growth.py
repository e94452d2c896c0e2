"""`python -m soak.growth`: what memory, descriptors and threads grow by in thousands of steps, in each integration.

Each job runs in ranks of its own. After a warm-up it looks at them at equal distances; the growth is from the first looks to the
last ones. Prints one line of JSON a job; ends with 1 if something grew.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from worlds import World, seeded

import gradwire as gw
from soak.endurance import PAGE
from soak.training import threads_and_files

LOOKS = 20
NEIGHBOURS = 3
"""The smallest of so many looks counts: buffers come and go."""
WARM_UP = 10
"""Looks that do not count: what keeps the last steps, such as flight records, fills."""
MOST_BYTES = 1_000_000
MOST_BYTES_OF_SHORT_RUNS = 4_000_000
"""Where looks are less than 500 steps apart, lists of the last steps are still growing."""
Look = Callable[[], None]
BATCHES = 50


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 20, generator=seeded(dist.get_rank(), step % BATCHES))


def loop(steps: int, run: torch.nn.Module, optimizer: Any, look: Look, backward: Callable[[Any], None] | None = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(batch(step)).square().mean()
        (backward or torch.Tensor.backward)(loss)
        optimizer.step()
        look()


def hook(steps: int, look: Look) -> None:
    model = network()
    run = DistributedDataParallel(model)
    state = gw.DDPState(plan=gw.ErrorFeedback(gw.QSGD(bits=2)))
    run.register_comm_hook(state, gw.ddp_hook)
    loop(steps, run, torch.optim.SGD(model.parameters(), lr=0.01), look)


def of_fsdp2(steps: int, look: Look) -> None:
    from gradwire.integrations import fsdp2

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    exchanges = fsdp2.compress(model, gw.ErrorFeedback(gw.QSGD(bits=2)))
    loop(steps, model, torch.optim.SGD(model.parameters(), lr=0.01), look)
    exchanges.close()


def of_hsdp(steps: int, look: Look) -> None:
    from gradwire.integrations import fsdp2

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    model = network()
    fully_shard(model, mesh=mesh["inside"])
    exchanges = fsdp2.replicate(model, mesh["between"].get_group(), gw.QSGD(bits=4))
    loop(steps, model, torch.optim.SGD(model.parameters(), lr=0.01), look)
    exchanges.close()


def of_c10d(steps: int, look: Look) -> None:
    """All-reduces whose sizes change from step to step, and seldom return."""
    from gradwire.integrations import c10d

    c10d.register_model(torch.nn.Module())
    c10d.quantise(min_numel=1000)
    group = dist.new_group(backend="gradwire")
    for step in range(steps):
        dist.all_reduce(torch.ones(1000 + 37 * step % 4999), group=group)
        look()
    group.close()


def of_accelerate(steps: int, look: Look) -> None:
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    as_torchrun()
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), network()
    loader = DataLoader(TensorDataset(torch.randn(64, 20)), batch_size=4)
    made = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.01), loader, plan=gw.QSGD(bits=4))
    prepared, optimizer, _ = made
    for step in range(steps):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        look()


def of_lightning(steps: int, look: Look) -> None:
    import lightning

    from gradwire.integrations.lightning import GradwireStrategy

    as_torchrun()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, rows: Any, at: int) -> torch.Tensor:
            look()
            return self.net(rows[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=dist.get_world_size(), logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
            strategy=GradwireStrategy(plan=gw.QSGD(bits=4)),
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(64 * 4, 20)), batch_size=4))


def of_handles(steps: int, look: Look) -> None:
    """Two models that share lanes, of which one is prepared anew every 50 steps."""
    models = [network(), network()]
    handles = [gw.parallelize(each, plan=gw.QSGD(bits=4)) for each in models]
    for step in range(steps):
        for model in models:
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        if step % 50 == 49:
            handles.pop().detach()
            models[1] = network()
            handles.append(gw.parallelize(models[1], plan=gw.QSGD(bits=4)))
        look()
    for handle in handles:
        handle.detach()


def as_torchrun() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests")


JOBS: dict[str, tuple[int, Callable[[int, Look], None]]] = {
    "handles": (2, of_handles),
    "hook": (2, hook),
    "fsdp2": (2, of_fsdp2),
    "hsdp": (4, of_hsdp),
    "c10d": (2, of_c10d),
    "accelerate": (2, of_accelerate),
    "lightning": (2, of_lightning),
}
"""The number of ranks, and what each rank does: call `look` after each step."""


class Looks:
    """Memory, descriptors and threads, at equal distances."""

    def __init__(self, steps: int) -> None:
        self._every, self._step = max(1, steps // LOOKS), 0
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self) -> None:
        self._step += 1
        if self._step % self._every == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # of the only heap
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            self.seen.append((resident, *threads_and_files()))

    def growth(self) -> tuple[int, int, int]:
        """From the first looks that count to the last ones: bytes, files, threads."""
        counted = self.seen[WARM_UP:]
        first, last = counted[:NEIGHBOURS], counted[-NEIGHBOURS:]
        byte, files, threads = (min(column) for column in zip(*last, strict=True))
        before = [min(column) for column in zip(*first, strict=True)]
        return byte - before[0], files - before[1], threads - before[2]


def measured(job: str, steps: int) -> tuple[int, int, int]:
    """What a rank's process grew by."""
    for name in ("gradwire", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    looks = Looks(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        JOBS[job][1](steps, looks)
    return looks.growth()


def grown(jobs: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """The worst rank of each job."""
    os.environ["MALLOC_ARENA_MAX"] = "1"  # memory that is free at the end of a thread's own heap is never given back
    most = MOST_BYTES if steps >= 500 * LOOKS else MOST_BYTES_OF_SHORT_RUNS
    for job in jobs:
        began, size = time.monotonic(), JOBS[job][0]
        with World(size, 60.0) as world:
            found = [max(each) for each in zip(*world.run(measured, job, steps, deadline_s=120 + steps * 0.1), strict=True)]
        row = dict(zip(("memory_bytes", "descriptors", "threads"), found, strict=True))
        passed = found[0] < most and found[1] <= 0 and found[2] <= 0
        yield {"job": job, "ranks": size, "steps": steps} | row | {"seconds": round(time.monotonic() - began), "passed": passed}


def main(arguments: list[str]) -> int:
    """Run the jobs that are asked for; 1 if one grew."""
    parser = argparse.ArgumentParser(prog="python -m soak.growth")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of each job")
    parser.add_argument("--only", default=",".join(JOBS), help="jobs, with commas between")
    options = parser.parse_args(arguments)
    passed = True
    for row in grown(options.only.split(","), options.steps):
        print(json.dumps(row), flush=True)
        passed &= row["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
