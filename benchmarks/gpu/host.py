"""The host's time for queueing a backward of BERT-large's size with one rank, the kernels that it launches, and the memory."""

import statistics
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.findings import MEASURED, SKIPPED, Job
from benchmarks.gpu.training import LARGE_PLANS, free_port, init_group, large_backward, large_model, parallelized, synchronize


def codec_kernels() -> set[str]:
    """The names of gradwire's Triton kernels that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("gradwire.kernels.triton.")]
    return {name for module in modules for name, value in vars(module).items() if type(value).__name__ == "JITFunction"}


def launches(step: Any) -> dict[str, Any]:
    """What the GPU did in one step, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    events = [event for event in seen.events() if event.device_type.name == "CUDA"]
    own = codec_kernels()
    codecs = [event for event in events if event.name in own]
    us = round(sum(event.device_time for event in codecs))
    return {"gpu_events": len(events), "codec_launches": len(codecs), "codec_us": us}


def measure(job: Job, name: str, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Measure the steps of one plan."""

    def step() -> tuple[float, float]:
        backward = large_backward(model, x)
        began = time.perf_counter()
        backward()
        queued = time.perf_counter() - began
        synchronize(job.device)
        done = time.perf_counter() - began
        model.zero_grad()
        return 1e3 * queued, 1e3 * done

    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with parallelized(model, LARGE_PLANS[name]) as handle:
        times = [step() for _ in range(5 if job.small else 12)][2 if job.small else 4 :]
        queued, done = (round(statistics.median(each), 2) for each in zip(*times, strict=True))
        found: dict[str, Any] = {"queued_ms": queued, "done_ms": done}
        if handle is not None:
            found |= {"buckets": len(handle.plan.buckets)}
        if job.device == "cuda":
            found |= {"memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)}
        job.write(name, MEASURED, **found)
        if job.device == "cuda":
            job.write(f"{name}, launches", MEASURED, **launches(step))


def run(job: Job) -> None:
    if job.device == "cpu":
        job.write("launches and memory", SKIPPED, why="a CPU launches no kernels and has no memory of its own")
    init_group(job.device, 0, 1, free_port())
    model, x = large_model(job.device)
    for name in LARGE_PLANS:
        with job.failures(name):
            measure(job, name, model, x)
