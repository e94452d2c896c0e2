"""A rank that is killed under torchrun with --max-restarts: its agent starts all again."""

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from worlds import CONTEXT

from soak.settings import Fault, Job
from soak.stage import Stage, expect
from soak.training import End, train
from soak.trials import KINDS

MOST_S = 40.0
"""For a start, a death and a start anew."""


def torchrun_restarts(stage: Stage) -> None:
    """All begin again from checkpoints and end as if nothing had been."""
    stage.decide()
    chance = stage.chance
    fault = Fault("dies", chance.randrange(stage.size), stage.begin + chance.randint(3, 12), draw=chance.random())
    job = replace(stage.job, steps=stage.begin + 24, checkpoint_every=5, fault=fault)
    ours, theirs = CONTEXT.Pipe()
    agent = CONTEXT.Process(target=as_torchrun, args=(job, theirs))
    agent.start()
    theirs.close()
    try:
        expect(ours.poll(MOST_S), f"torchrun's agent did not end in {MOST_S} s: {logged(job)}")
        restarts, ends = ours.recv()
    except EOFError:
        restarts, ends = 0, []
    finally:
        agent.terminate()  # its ranks end with it
        agent.join(10)
        agent.kill()
    expect(bool(ends) and all(isinstance(end, End) for end in ends), f"torchrun failed: {ends} {logged(job)}")
    if restarts:
        stage.notes.fired = f"torchrun started all again, {restarts} time"
    stage.alike(ends)
    if not stage.notes.not_comparable:
        stage.same(ends, stage.kept(replace(job, folder=stage.new_folder(), checkpoint_every=0, fault=None)))


KINDS["torchrun restarts"] = torchrun_restarts


def logged(job: Job) -> str:
    """The end of what the agent and its ranks said."""
    return Path(f"{job.folder}/torchrun.log").read_text()[-3000:]


def as_torchrun(job: Job, pipe: Connection) -> None:
    """What torchrun does: an agent, and a process for each rank."""
    log = os.open(f"{job.folder}/torchrun.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stderr.fileno())  # the agent says at length what it does to ranks
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=job.ranks, run_id=f"soak{job.seed}", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", max_restarts=10, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    found = elastic_launch(config, as_rank)(job)
    restarts = [restart for restart, _ in found.values()]
    pipe.send((max(restarts), [end for _, (_, end) in sorted(found.items())]))


def as_rank(job: Job) -> tuple[int, End]:
    """A script. In its first life one of the ranks dies. Which life this is, and how it ended."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that of the agent came with the fork; torchrun's ranks have none
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place, port = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}, os.environ["MASTER_PORT"]
    store = dist.PrefixStore(f"life {restart}", dist.TCPStore(place["MASTER_ADDR"], int(port), is_master=False))
    dist.init_process_group(
        "gloo", store=store, rank=int(place["RANK"]), world_size=int(place["WORLD_SIZE"]), timeout=timedelta(seconds=30)
    )
    if restart:
        job = replace(job, fault=None)
    end = train(job)
    dist.destroy_process_group()
    return restart, end
