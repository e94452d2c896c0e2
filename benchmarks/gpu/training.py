"""What several sections train with: plans, process groups, small models, and one of BERT-large's size."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core import Spec

PLANS: dict[str, Spec | gw.Policy] = {
    "Identity": gw.Identity(),
    "4 bits": gw.QSGD(bits=4),
    "2 bits, feedback": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "TopK, feedback": gw.ErrorFeedback(gw.TopK(0.01)),
    "PowerSGD": gw.PowerSGD(rank=4, start_step=0),
    "4 bits, residual in int8": gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=4)), residual_dtype="int8"),
}
SUMS = ("Identity", "PowerSGD")
"""Plans whose numbers the backend adds up, in its own order."""
LARGE_PLANS: dict[str, Spec | gw.Policy | None] = {
    "without gradwire": None,
    "Identity": gw.Identity(),
    "4 bits": gw.QSGD(bits=4),
    "4 bits, buckets of 32 MB": gw.Policy(default=gw.QSGD(bits=4), bucket_bytes=2**25, chunk_bytes=2**25),
}


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def init_group(device: str, rank: int, world_size: int, port: int, nccl: bool = True) -> None:
    """Make the default process group; on a GPU with gloo for tensors on the CPU. Without NCCL lanes for a GPU are host-staged."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and nccl else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)


@contextmanager
def parallelized(model: torch.nn.Module, plan: Spec | gw.Policy | None) -> Iterator[gw.Handle | None]:
    """Parallelize a model with one plan for a while. `plan` None: leave it as it is."""
    handle = None if plan is None else gw.parallelize(model, plan=plan)
    try:
        yield handle
    finally:
        if handle is not None:
            handle.detach()


def trained(plan: Spec | gw.Policy | None, device: str, width: int, layers: int, watch: bool = False) -> torch.Tensor:
    """The weights after six steps, on the CPU. `plan` None: without gradwire.

    watch: in the last backward, an operation for which the host would wait for the GPU raises RuntimeError.
    """
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU())]
    model = torch.nn.Sequential(*parts).to(device)
    with parallelized(model, plan):
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(64, width, generator=generator).to(device)
            loss = model(x).square().mean()
            if watch and step == 5:
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss.backward()
            finally:
                if watch:
                    torch.cuda.set_sync_debug_mode("default")
            # no optimizer of torch: the first one of a process loads torch.compile, half of a small section's time
            with torch.no_grad():
                torch._foreach_add_([*model.parameters()], [each.grad for each in model.parameters()], alpha=-0.05)
            model.zero_grad()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).cpu()


def large_model(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model with the matrices of BERT-large's 24 layers, 302 M parameters, and a batch. On a CPU: two narrow layers."""
    layers, width, batch = (24, 1024, 2048) if device == "cuda" else (2, 64, 32)
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width) for _ in range(4)]
        parts += [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
        parts += [torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*parts).to(device), torch.randn(batch, width, device=device)


def large_backward(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Run forward in bfloat16, and return backward."""
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    return lambda: loss.backward()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
