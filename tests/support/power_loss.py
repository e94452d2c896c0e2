"""A rank of test_power_loss.py: trains, and prints when a link may be cut, and the error that it gets.

python power_loss.py SCENARIO ...
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from worlds import Given, digest

import gradwire as gw

SPEC = gw.QSGD(bits=4)
PLANS = {
    "wires": gw.Uniform(SPEC),
    "gloo": gw.Uniform(gw.Identity()),
    "alone": gw.Uniform(SPEC),
    "flap": gw.Uniform(SPEC),
    "patient": gw.Uniform(SPEC),
    "slow": gw.Uniform(SPEC),
    "pipelined": gw.Uniform(SPEC, schedule="pipelined"),
    "sharded": gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)),
    "delayed": gw.Uniform(SPEC, schedule="delayed"),
    "local": gw.Uniform(SPEC, schedule=gw.LocalSteps(every=3)),
}
BUSY_S = 11.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in sys.argv[1:]:
        train(scenario)
        dist.barrier()
    os._exit(0)  # a thread may still wait for the store


def train(scenario: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Given([200_000, 300, 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    silence_s = 25.0 if scenario == "patient" else None
    handle = gw.parallelize(model, optimizer, plan=PLANS[scenario], silence_s=silence_s)
    try:
        for step in range(10**6):
            model(model.random_gradients(rank, step % 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5 and rank == 0:
                print("ready", scenario, flush=True)
            if step == 5:
                wait(scenario, rank)
            if scenario in ("flap", "patient", "slow") and step >= 5 and finished(scenario, step):
                break
    except gw.CommunicationError as error:
        print("told", scenario, str(error).replace("\n", " "), flush=True)
    else:
        print("end", scenario, digest(model.parameters()), flush=True)
    handle.detach()


def wait(scenario: str, rank: int) -> None:
    """Wait on this rank while the others go on, as the scenario asks."""
    if scenario == "alone" and rank == 0:
        time.sleep(BUSY_S)
    if scenario == "slow" and rank == 1:
        time.sleep(15)
    if scenario == "slow" and rank == 2:  # and the others' messages fill its windows
        waker = subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()


def finished(scenario: str, step: int) -> bool:
    """Return whether the run may end. Ranks do not look at a clock, because all must end after the same step."""
    if scenario == "slow":
        return step >= 8
    time.sleep(0.02)
    return step >= 250


if __name__ == "__main__":
    main()
