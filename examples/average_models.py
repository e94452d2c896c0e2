"""Average the weights of each rank's own model, compressed to 8 bits, without gradwire's engine.

torchrun --nproc-per-node 2 examples/average_models.py
"""

import torch
import torch.distributed as dist

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank has another model
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    exchange = gw.Exchange(dict(model.named_parameters()), plan=gw.QSGD(bits=8))
    exchange.average_()
    norm = torch.cat([weight.flatten() for weight in model.parameters()]).norm().item()
    print(f"rank {dist.get_rank()}: norm {norm:.6f}, {exchange.stats().wire_bytes} bytes sent", flush=True)
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
