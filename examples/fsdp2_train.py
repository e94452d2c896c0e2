"""gradwire in FSDP2: reduce-scatters of 4 bits in place of float32.

torchrun --nproc-per-node 2 examples/fsdp2_train.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gradwire.integrations import fsdp2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    fully_shard(model)
    exchanges = fsdp2.compress(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for step in range(20):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(32, 100)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.full_tensor().sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, weights {weights:.6f}")
    exchanges.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
