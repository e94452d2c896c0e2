"""Torch's collectives inside an island and between islands. A failure names the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from gradwire.errors import CommunicationError

__all__ = ["GroupLink", "LostRankError", "naming_ranks"]


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


class GroupLink(NamedTuple):
    """A process group of torch as a link on which ranks compare facts."""

    group: dist.ProcessGroup

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order. Collective."""
        rows: list[Any] = [b""] * self.group.size()
        with naming_ranks(self.group):
            dist.all_gather_object(rows, own, group=self.group)
        return rows
