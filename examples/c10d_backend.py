"""gradwire as a backend of torch.distributed: gradients of 4 bits in a script of DDP.

The import and the backend's name are enough to use it; the rest tells it where layers begin and end.

torchrun --nproc-per-node 2 examples/c10d_backend.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.integrations import c10d


def main() -> None:
    dist.init_process_group("gradwire")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    c10d.register_model(model)
    c10d.set_layer_bits("2.weight", 8)  # the last layer
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
