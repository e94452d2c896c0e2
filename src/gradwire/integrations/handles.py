"""Helpers for handles inside frameworks: the model's `no_sync`, numbers for the log, and all ranks' states in checkpoints."""

import io
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.api import Handle
from gradwire.core import make_folder, write_whole
from gradwire.engine import Patch

__all__ = ["NoSync", "facts", "from_bytes", "gather_states", "load_handle", "save_handle", "to_bytes"]


class NoSync(Patch):
    """Replaces DDP's `no_sync` in a model, where frameworks look for it. Copies of the model do not have it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self) -> AbstractContextManager[None]:
        return self._handle.no_sync()

    def before_copy(self) -> None:
        """Do nothing."""


def facts(handle: Handle) -> dict[str, float]:
    """Numbers for a framework's log: megabytes that this rank sends in a step, milliseconds that the end of backward waits for
    gradients, and the number of decisions so far."""
    stats = handle.stats()
    return {
        "gradwire_sent_mb": stats.wire_bytes / 1e6,
        "gradwire_exposed_ms": stats.exposed_us / 1e3,
        "gradwire_decisions": float(stats.decided),
    }


def save_handle(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Write this rank's state into the folder, as `gradwire-rank{r}.pt`. Call it on every rank, between steps."""
    write_whole(make_folder(folder) / _name(handle), to_bytes(handle.state_dict()))


def load_handle(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Load the states that ranks wrote into the folder. Call it on every rank, between steps.

    A rank reads its own file, or all files if another number of ranks saved. Without any file residuals begin at zero, with a
    warning. Raises ValueError if a file does not fit the handle.
    """
    own, files = Path(folder) / _name(handle), sorted(Path(folder).glob("gradwire-rank*.pt"))
    if not files:
        warnings.warn(
            f"{folder} has no gradwire-rank*.pt: it was saved without gradwire, or by another node. Residuals begin at zero.",
            stacklevel=3,
        )
        return
    device, group = handle.session.device, handle.session.group
    state = torch.load(own, map_location=device, weights_only=True) if own in files else {}
    ranks = state.get(f"rank{group.global_ranks[group.rank]}/ranks")
    if ranks is None or tuple(ranks.tolist()) != group.global_ranks:
        for path in files:
            state |= torch.load(path, map_location=device, weights_only=True)
    handle.load_state_dict(state)


def gather_states(handle: Handle) -> dict[str, torch.Tensor]:
    """Gather the states of all ranks in one dictionary on the CPU of the group's first rank. Other ranks get an empty dictionary.
    Call it on every rank, between steps."""
    group, device = handle.session.group, handle.session.device
    own = torch.frombuffer(bytearray(to_bytes(handle.state_dict())), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in group.global_ranks]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group.process_group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(own, (0, longest - len(own)))
    rows = [torch.empty_like(padded) for _ in sizes] if group.rank == 0 else None
    dist.gather(padded, rows, dst=group.global_ranks[0], group=group.process_group)
    states: dict[str, torch.Tensor] = {}
    for row, size in zip(rows or (), sizes, strict=False):
        states |= from_bytes(row[: int(size)].cpu().numpy().tobytes())
    return states


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """The bytes of `torch.save` for a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """The state from the bytes of `to_bytes`, on the CPU."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def _name(handle: Handle) -> str:
    group = handle.session.group
    return f"gradwire-rank{group.global_ranks[group.rank]}.pt"
