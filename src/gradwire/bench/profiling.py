"""Profile one of the bench's jobs, on ranks that a launcher started."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.bench.jobs import make_job
from gradwire.core.specs import Spec
from gradwire.errors import StepStateError
from gradwire.profiler import Profiling
from gradwire.profiler.recorder import WARMUP_STEPS


def profile_job(name: str, folder: Path, steps: int, specs: Sequence[Spec], plan: Spec, seed: int = 0) -> Profiling:
    """Train the job under a uniform plan and profile it, with one compute thread per rank. Collective.

    Raises StepStateError without at least two ranks, FormatError if the job does not exist.
    """
    job = make_job(name, seed)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise StepStateError(
            "there is one rank, and a profile measures links between ranks. Start two ranks or more, for example: gradwire "
            f"emulate --nodes 2 --inter 500mbit -- -m gradwire profile --job {name}"
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        model = job.make_model(seed)
        optimizer = job.make_optimizer(model)
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(plan))
        count = WARMUP_STEPS + 2 * steps
        batches = [job.batch(dist.get_rank(), dist.get_world_size(), step) for step in range(count)]
        with handle.profile(folder, steps, specs) as found:
            for batch in batches:
                loss = job.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
        handle.detach()
        return found
    finally:
        dist.destroy_process_group()
