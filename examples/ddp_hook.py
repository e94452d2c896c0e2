"""gradwire as a communication hook of DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_hook.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    wrapped.register_comm_hook(gw.DDPState(), gw.ddp_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(20):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = wrapped(torch.randn(32, 100)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, weights {weights:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
