"""An ordinary data-parallel training script, with gradwire or with DDP.

Run it on a slow network that is emulated on this machine, two nodes at 100 Mb/s:

    gradwire emulate --nodes 2 --inter 100mbit -- examples/train.py
    gradwire emulate --nodes 2 --inter 100mbit -- examples/train.py ddp

or on real nodes with torchrun.
"""

import logging
import sys
import time

import torch
import torch.distributed as dist

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    rank, use_ddp = dist.get_rank(), "ddp" in sys.argv
    logging.basicConfig(format="%(message)s")  # gradwire logs in one line what it decided
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if use_ddp:
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        handle = gw.parallelize(model, optimizer)  # instead of DistributedDataParallel

    teacher = torch.randn(64, 10)
    torch.manual_seed(1 + rank)  # every rank has data of its own
    start = time.perf_counter()
    for step in range(1, 151):
        inputs = torch.randn(64, 64)
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and rank == 0:
            milliseconds = 1e3 * (time.perf_counter() - start) / 50
            print(f"steps {step - 49} to {step}: loss {loss.item():.3f}, {milliseconds:.1f} ms a step")
            start = time.perf_counter()

    if rank == 0 and not use_ddp:
        stats = handle.stats()
        print(f"{stats.wire_bytes / 1e6:.2f} MB sent a step for {stats.gradient_bytes / 1e6:.2f} MB of gradients")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
