"""A rank of a trial on an emulated cluster: a script as users write it. `rank.py FOLDER SEED TIMEOUT STEPS [suicidal]`."""

import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from soak.training import job_of, train


def main() -> None:
    folder, seed, timeout_s, steps, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(timeout_s))
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    job = job_of(int(seed), folder, steps=int(steps), checkpoint_every=5)
    if "suicidal" in flags:
        kill_oneself_once(job.folder, rank, int(seed), int(steps))
    end = train(job)
    print(f"END {rank} {end.kind} {end.digest} {end.words}", flush=True)
    if end.kind != "finished":
        os._exit(1)  # as a script that does not catch the error; torchrun starts all again
    dist.destroy_process_group()


def kill_oneself_once(folder: str, rank: int, seed: int, steps: int) -> None:
    """SIGKILL from within at a moment of training, in the first life only."""
    chance, marker = random.Random(seed), Path(folder) / "died"
    victim, after_s = chance.randrange(dist.get_world_size()), chance.uniform(0.05, 0.5)
    if rank != victim or marker.exists():
        return
    import threading

    def die() -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(after_s, die).start()


if __name__ == "__main__":
    main()
