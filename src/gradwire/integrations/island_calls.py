"""Torch's collectives inside an island and between islands. A failure names the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.errors import CommunicationError

__all__ = ["GroupLink", "LostRankError", "gather_rows", "naming_ranks"]


class LostRankError(CommunicationError):
    """A rank of the island, or one at the same place of another island, died or stalled. Nobody can replace it."""


@contextmanager
def naming_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise LostRankError where a collective of this group fails inside."""
    try:
        yield
    except RuntimeError as error:
        own = dist.get_rank()
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LostRankError(
            f"rank {own}: one of the ranks {others} died or stalled, and this rank cannot go on without it. See the logs of "
            f"these ranks. `torchrun --max-restarts` starts them again. (The backend said: {cause})"
        ).about(others) from error


def gather_rows(group: dist.ProcessGroup, own: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of every rank, in rank order. All have one size. Collective."""
    rows = [torch.empty_like(own) for _ in range(group.size())]
    with naming_ranks(group):
        dist.all_gather(rows, own, group=group)
    return rows


class GroupLink(NamedTuple):
    """A process group of torch as a link on which ranks compare facts."""

    group: dist.ProcessGroup
    device: torch.device
    """For the tensors that are sent."""

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order. Collective."""
        sizes = [int(each) for each in gather_rows(self.group, torch.tensor([len(own)], device=self.device))]
        padded = torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8).to(self.device)
        rows = gather_rows(self.group, padded)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
