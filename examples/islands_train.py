"""Two islands of two ranks: gradients are averaged in every step inside an island, and weights every 10 steps between islands.

torchrun --standalone --nproc-per-node 4 examples/islands_train.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("between", "inside"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    fully_shard(model, mesh=mesh["inside"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    made = gw.islands(model, optimizer, mesh, gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=10)))
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        inputs = torch.randn(32, 100, generator=random)
        loss = (model(inputs) - inputs[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.full_tensor().sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, weights {weights:.6f}")
    made.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
