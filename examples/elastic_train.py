"""Training with members that come and go. Start `gradwire lighthouse` once, and one torchrun for each member:

torchrun --standalone --nproc-per-node 1 --max-restarts 100 examples/elastic_train.py HOST:29510
"""

import os
import sys

import torch

import gradwire as gw

STEPS = int(os.environ.get("STEPS", "300"))


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    plan = gw.Policy(default=gw.QSGD(bits=4))
    job = gw.elastic(model, optimizer, plan=plan, min_replicas=2, lighthouse=sys.argv[1], also=[scheduler])
    random = torch.Generator()
    random.seed()  # each member has samples of its own
    while job.step < STEPS:
        inputs = torch.randn(32, 100, generator=random)
        loss = (model(inputs) - inputs[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if job.step % 50 == 0:
            print(f"step {job.step}: loss {loss.item():.4f}, {job.world_size} members", flush=True)
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"step {job.step}: weights {weights:.6f}", flush=True)
    job.leave()


if __name__ == "__main__":
    main()
