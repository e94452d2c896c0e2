"""An integration in one file: gradwire as a communication hook of DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_hook.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


class AveragingState:
    """One exchange for each set of parameters that DDP puts into one bucket."""

    def __init__(self, model: torch.nn.Module, plan: gw.Policy | gw.Spec) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.plan = plan
        self.exchanges: dict[tuple[str, ...], gw.Exchange] = {}


def averaging_hook(state: AveragingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket's gradients in place with `gw.Exchange`."""
    names = tuple(state.names[parameter] for parameter in bucket.parameters())
    gradients = dict(zip(names, bucket.gradients(), strict=True))
    if names not in state.exchanges:  # DDP makes its buckets anew after the first step, on all ranks alike
        state.exchanges[names] = gw.Exchange(gradients, state.plan)
    state.exchanges[names].average_(gradients)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(AveragingState(model, gw.QSGD(bits=4)), averaging_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(20):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = wrapped(torch.randn(32, 100)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        f"rank {dist.get_rank()}: loss {loss.item():.4f}, weights {sum(p.sum().item() for p in model.parameters()):.6f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
