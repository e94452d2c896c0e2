"""Ranks that are not equally fast: each takes a part of the batch that fits its speed, and means are over samples.

torchrun --nproc-per-node 2 examples/unequal.py

Any number of ranks learns the same model, with any parts.
"""

import time

import torch
import torch.distributed as dist

import gradwire as gw

BATCH, STEPS = 48, 20


def seconds_a_sample(model: torch.nn.Module) -> float:
    """Seconds in which this rank computes one sample, without any exchange."""
    inputs = torch.randn(BATCH, 100)
    start = time.perf_counter()
    for _ in range(5):
        model(inputs).square().mean().backward()
    model.zero_grad()
    return (time.perf_counter() - start) / (5 * BATCH)


def parts_of(seconds: list[float]) -> list[int]:
    """The samples of each rank: the slower, the fewer, and at least one."""
    speeds = [1 / each for each in seconds]
    ends = [round(BATCH * sum(speeds[: rank + 1]) / sum(speeds)) for rank in range(len(speeds))]
    parts = [max(1, end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    parts[parts.index(max(parts))] -= sum(parts) - BATCH
    return parts


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(seconds, seconds_a_sample(model))
    parts = parts_of(seconds)
    handle = gw.parallelize(model, optimizer, plan=gw.Identity())
    for step in range(STEPS):
        batch = torch.randn(BATCH, 100, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        own = batch.split(parts)[rank]
        handle.weight(len(own))
        model(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {rank}: {parts[rank]} of {BATCH} samples, weights {weights:.6f}")


if __name__ == "__main__":
    main()
