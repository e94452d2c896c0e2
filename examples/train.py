"""An ordinary data-parallel training script with gradwire's one line.

Run it on a slow network made on this machine (two nodes at 100 Mb/s), then without the line's compression:

    gradwire emulate --nodes 2 --inter 100mbit -- examples/train.py
    gradwire emulate --nodes 2 --inter 100mbit -- examples/train.py identity

or on real nodes with torchrun.
"""

import sys
import time

import torch
import torch.distributed as dist

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    spec = gw.Identity() if "identity" in sys.argv else gw.QSGD(bits=4)
    handle = gw.parallelize(model, optimizer, plan=spec)  # the one line

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    for step in range(1, 101):
        inputs = torch.randn(64, 64)
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {1e3 * (time.perf_counter() - start) / step:.1f} ms a step")

    if rank == 0:
        stats = handle.stats()
        sent, plain = stats.wire_bytes / 2**20, 2 * (world_size - 1) / world_size * stats.gradient_bytes / 2**20
        print(f"{spec}: {sent:.2f} MB sent a step by this rank, {plain:.2f} MB without compression")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
