"""The ranks of a bench run, for everything that is not measured: meeting, agreeing, gathering, counting bytes."""

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from gradwire.bench.loopback import LOOPBACK

__all__ = ["Ranks", "die_with", "sent_by_interface"]

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
TIMEOUTS_TO_AGREE = 3
"""How many timeouts of a method's collective a rank waits for the others, who may have to sit out theirs first."""


class Ranks:
    """The default process group, which no method uses. One rank that communicates nothing needs none."""

    def __init__(self, timeout_s: float, communicating: bool) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        """Ranks that share this rank's node, and so its interface: on plain loopback all of them."""
        self.distributed = self.world_size > 1 or communicating
        self._timeout = timedelta(seconds=timeout_s)
        if self.distributed:
            dist.init_process_group("gloo", timeout=TIMEOUTS_TO_AGREE * self._timeout)

    def new_group(self) -> dist.ProcessGroup | None:
        """A process group of all ranks for one method."""
        return dist.new_group(timeout=self._timeout) if self.distributed else None

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.distributed:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. It must be what JSON can hold: nothing from the wire is unpickled."""
        if not self.distributed:
            return [value]
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
        return [json.loads(bytes(text.tolist())) for text in texts]

    def all_problems(self, problem: str | None) -> str | None:
        """What every rank that has a problem says: the same answer on all. Where one rank fails, others time out."""
        said = [f"rank {rank}: {words}" for rank, words in enumerate(self.gather(problem)) if words is not None]
        return "; ".join(said) or None

    def close(self) -> None:
        """Leave the group."""
        if self.distributed:
            dist.destroy_process_group()


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies, however it dies: a rank alone would train on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(f"the runner (process {parent}) of this rank is gone")


def sent_by_interface() -> int:
    """Bytes that the interface gloo uses has sent, for all ranks that share it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    if interface not in counters:
        raise RuntimeError(f"there is no interface {interface!r} (GLOO_SOCKET_IFNAME), only {', '.join(counters)}")
    return int(counters[interface].bytes_sent)
