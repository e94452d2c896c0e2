"""A rank of an island that tests start, kill and restart: it writes a line of JSON for every round that counts.

python elastic_island.py LIGHTHOUSE KIND SEED FOLDER, with the variables of torchrun

KIND is ddp or fsdp2. It trains until the round in the file FOLDER/end.
"""

import hashlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


def main() -> None:
    lighthouse, kind, seed, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(int(seed))  # every island begins with other weights
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    plan = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=4)), schedule=gw.LocalSteps.diloco(every=3))
    job = gw.elastic(model, optimizer, plan=plan, min_replicas=2, lighthouse=lighthouse, timeout_s=20.0, island=dist.group.WORLD)
    end, told = Path(folder) / "end", 0
    samples = torch.Generator().manual_seed(1000 * int(seed) + dist.get_rank())
    while not (end.exists() and job.step >= int(end.read_text())):
        inputs = torch.randn(16, 20, generator=samples)
        (model(inputs) - inputs[:, :3]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if job.step != told:
            told = job.step
            with job.global_weights():
                print(json.dumps({"step": told, "weights": digest(model), "members": job.world_size}), flush=True)
    job.leave()
    dist.destroy_process_group()


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sha.update(whole.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


if __name__ == "__main__":
    main()
