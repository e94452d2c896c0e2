"""A member of an elastic job that tests start, kill and restart: it writes a line of JSON for every step that counts.

python elastic_member.py LIGHTHOUSE PLAN SEED FOLDER

It trains until the step in the file FOLDER/end, and leaves earlier when it gets SIGTERM.
"""

import gc
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import gradwire as gw

__all__ = ["PLANS", "TIMEOUT_S"]

TIMEOUT_S = 8.0
PLANS: dict[str, Any] = {
    "exact": gw.Identity(),
    "4 bits": gw.QSGD(bits=4),
    "2 bits with feedback": gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd")),
    "low rank": gw.PowerSGD(rank=2),
    "auto": "auto",
    "local": gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps.diloco(every=3)),
}
PAUSE_S = 0.01
"""The time that a step computes, at least."""


def main() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse, plan, seed, folder = sys.argv[1:]
    torch.set_num_threads(1)
    leaves = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaves.set())
    if os.environ.get("VERBOSE"):
        logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(asctime)s %(message)s")
    torch.manual_seed(int(seed))  # every member begins with other weights
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.3, 2000)
    teacher = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
    # the runtime of torchft's servers has two sockets until the process ends
    LighthouseServer(bind="127.0.0.1:0", min_replicas=1).shutdown()
    before = held()
    job = gw.elastic(
        model, optimizer, plan=PLANS[plan], min_replicas=2, lighthouse=lighthouse, also=[scheduler], timeout_s=TIMEOUT_S
    )
    end, told = Path(folder) / "end", 0
    while not leaves.is_set() and not (end.exists() and job.step >= int(end.read_text())):
        inputs = torch.randn(16, 20)
        loss = (model(inputs) - inputs @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(PAUSE_S)
        if job.step != told:
            told = job.step
            with job.global_weights():
                weights = digest(model)
            say(step=told, weights=weights, members=job.world_size, loss=loss.item(), decided=job.decision is not None)
    job.leave()
    del job
    until = time.monotonic() + 10
    while held() != before and time.monotonic() < until:
        time.sleep(0.1)  # threads of C++ end a little later
    say(before=before, after=held())


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def held() -> dict[str, int]:
    """The sockets and the threads of gradwire that this process has."""
    gc.collect()
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return {"sockets": sockets, "threads": sum(each.name.startswith("gradwire") for each in threading.enumerate())}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
