"""2, 4 and 8 ranks on one GPU over NCCL: means beside those of CPU ranks, and training that ends with equal weights.

NCCL refuses two ranks on one GPU, unless each has a host name of its own (NCCL_HOSTID); then it sends through sockets. On
a CPU 2 ranks use gloo, and their means are compared with the exact ones.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from benchmarks.gpu.findings import ABORTED, DIFFERS, FAILED, PARENT, PASSED, Job, die_with_parent, end_by, last_printed
from benchmarks.gpu.kernels import differing, largest_difference, outcome_of
from benchmarks.gpu.training import PLANS, SUMS, free_port, init_group, trained

WORLDS = {2: 1.0, 4: 1.5, 8: 3.0}
"""Numbers of ranks, and their shares of the section's time."""
MOST_ON_CPU = 2
"""So many ranks at most on a CPU."""
NCCL = {
    **{f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")},
    **{"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_PROTO": "Simple", "NCCL_MAX_NCHANNELS": "1"},
    "NCCL_DEBUG": "WARN",
}
GRACE = 5.0
"""Seconds that ranks get to end after one of them has failed."""


def tensors(rank: int, device: str) -> dict[str, torch.Tensor]:
    """One rank's tensors."""
    return {
        f"t{n}": torch.randn(n, n + 1, generator=torch.Generator().manual_seed(10 * n + rank)).to(device) for n in (3, 130, 700)
    }


def means(plan: Any, rank: int, device: str) -> dict[str, torch.Tensor]:
    """The means of the second of two exchanges, so that residuals have an effect; the second averages the means of the first."""
    values = tensors(rank, device)
    exchange = gw.Exchange(values, plan=plan)
    exchange.average_()
    exchange.average_()
    exchange.close()
    return {name: value.cpu() for name, value in values.items()}


def alike(values: list[torch.Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    digest = sha256(b"".join(value.contiguous().view(torch.uint8).numpy().tobytes() for value in values)).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8)
    seen = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, own)
    return all(torch.equal(own, other) for other in seen)


def exchange_on(job: Job, name: str, rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    """The outcome of one plan's exchange, the same on all ranks, and its facts."""
    began = time.perf_counter()
    found = means(PLANS[name], rank, job.device)
    took = round(time.perf_counter() - began, 2)
    equal = alike(list(found.values()))
    if job.device == "cuda":
        other, against = means(PLANS[name], rank, "cpu"), "CPU ranks"
    else:
        each = [tensors(number, "cpu") for number in range(world_size)]
        other, against = {key: torch.stack([own[key] for own in each]).mean(0) for key in found}, "exact means"
    differ = {key: differing(value, other[key]) for key, value in found.items()}
    relative = {key: largest_difference(value, other[key]) for key, value in found.items()}
    outcome = outcome_of(differ, relative, name in SUMS)
    if job.device == "cpu" and name != "Identity":
        # a plan that encodes loses something, but no more than everything
        outcome = PASSED if all(each <= 1.5 for each in relative.values()) else DIFFERS
    facts = {"against": against, "differ": differ, "relative": relative, "equal_on_ranks": equal, "s": took}
    return (outcome if equal else DIFFERS), facts


class Rank:
    """One rank of a world."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self.job, self.rank, self.world_size = job, rank, world_size
        self.what = ""
        """The subject of the finding that is being made."""

    def found(self, what: str, find: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        """Make one finding on all ranks, and write it on rank 0."""
        self.what = f"{self.world_size} ranks, {what}"
        outcome, facts = find()
        if self.rank == 0:
            self.job.write(self.what, outcome, **facts)

    def training(self, name: str) -> tuple[str, dict[str, Any]]:
        """Train with one plan: do all ranks end with equal weights?"""
        width, layers = (64, 2) if self.job.small else (1024, 8)
        began = time.perf_counter()
        equal = alike([trained(PLANS[name], self.job.device, width, layers)])
        return PASSED if equal else DIFFERS, {"equal_on_ranks": equal, "s": round(time.perf_counter() - began, 2)}


def rank_main(run_rank: Callable[[Rank, int], None]) -> None:
    """The process of one rank: call `run_rank` with the rank, and the port of rank 0. A rank writes its own error and ends, since
    the others wait for it."""
    die_with_parent()
    job, (rank, world_size, port) = Job.from_json(sys.argv[1]), map(int, sys.argv[2:])
    end_by(job.until)
    torch.set_num_threads(1)
    own = Rank(job, rank, world_size)
    try:
        run_rank(own, port)
    except Exception as error:
        job.write(own.what or f"{world_size} ranks", FAILED, rank=rank, error=f"{type(error).__name__}: {error}"[:1500])
        os._exit(1)  # without waiting for collectives that cannot end


def over_nccl(own: Rank, port: int) -> None:
    """All findings of one rank."""
    init_group(own.job.device, own.rank, own.world_size, port)
    for name in PLANS:
        own.found(f"exchange, {name}", partial(exchange_on, own.job, name, own.rank, own.world_size))
    for name in ("Identity", "4 bits"):
        own.found(f"training, {name}", partial(own.training, name))


def run_world(job: Job, world_size: int, killed: Collection[int] = ()) -> None:
    """Start the ranks, and end those that are not done in time, or some seconds after one has failed. `killed`: ranks that end by
    a signal, as they should."""
    port, until, failed = free_port(), job.until, False
    own = NCCL if job.device == "cuda" else {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.gpu.{job.section}", job.to_json()]
    with tempfile.TemporaryFile() as output:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(port)],
                env=os.environ | own | {"NCCL_HOSTID": f"host{rank}", PARENT: str(os.getpid())},
                stdout=output,
                stderr=output,
            )
            for rank in range(world_size)
        ]
        while time.time() < until and any(rank.poll() is None for rank in ranks):
            if not failed and any(rank.poll() for number, rank in enumerate(ranks) if number not in killed):
                failed, until = True, min(until, time.time() + GRACE)
            time.sleep(0.2)
        late = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        for number in late:
            ranks[number].kill()
        codes = [rank.wait() for rank in ranks]
        if any((code == 0) == (number in killed) for number, code in enumerate(codes)):
            printed = last_printed(output)
            job.write(f"{world_size} ranks", ABORTED, exit_status=codes, killed=late, printed=printed)


def run_worlds(job: Job, worlds: Mapping[int, float], killed: Mapping[int, Collection[int]]) -> None:
    """Run worlds one after another. worlds: numbers of ranks, and their shares of the section's time; on a CPU only
    small ones. killed: ranks of a world that end by a signal."""
    worlds = {number: weight for number, weight in worlds.items() if number <= MOST_ON_CPU or not job.small}
    for world_size, weight in worlds.items():
        rest = sum(other for number, other in worlds.items() if number >= world_size)
        until = time.time() + max(0.0, job.left() - 2) * weight / rest
        run_world(job._replace(until=until), world_size, killed.get(world_size, ()))


def run(job: Job) -> None:
    run_worlds(job, WORLDS, {})


if __name__ == "__main__":
    rank_main(over_nccl)
