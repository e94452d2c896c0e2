"""Connects the ranks of a bench run outside of measurements: barriers, agreement on errors, gathering, byte counters."""

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

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # defined in linux/prctl.h
TIMEOUTS_TO_AGREE = 3
"""A rank waits this many collective timeouts for the other ranks, because their collectives may time out first."""


class Ranks:
    """The default process group, which no method uses. A single rank of the floor needs none."""

    def __init__(self, timeout_s: float, communicating: bool) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        """Number of ranks on this rank's node, which share its interface. On plain loopback: all ranks."""
        self.distributed = self.world_size > 1 or communicating
        self._timeout = timedelta(seconds=timeout_s)
        if self.distributed:
            dist.init_process_group("gloo", timeout=TIMEOUTS_TO_AGREE * self._timeout)

    def new_group(self) -> dist.ProcessGroup | None:
        """Make a process group of all ranks for one method."""
        return dist.new_group(timeout=self._timeout) if self.distributed else None

    def meet(self) -> None:
        if self.distributed:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. They travel as JSON, because unpickling is unsafe."""
        if not self.distributed:
            return [value]
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
        return [json.loads(bytes(text.tolist())) for text in texts]

    def close(self) -> None:
        if self.distributed:
            dist.destroy_process_group()


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies, so that no rank outlives the runner."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(f"the runner of this rank (process {parent}) has ended")


def sent_by_interface() -> int:
    """Return the bytes that gloo's network interface has sent for all ranks that share the interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    if interface not in counters:
        raise RuntimeError(f"GLOO_SOCKET_IFNAME={interface} is no interface here. The interfaces are {', '.join(counters)}.")
    return int(counters[interface].bytes_sent)
