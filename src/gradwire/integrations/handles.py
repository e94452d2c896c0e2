"""Handles inside frameworks: `no_sync` of the model, and a file for each rank in the framework's checkpoint."""

import io
import os
import warnings
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from gradwire.api.handle import Handle
from gradwire.core.files import make_folder, write_whole
from gradwire.engine.seams.hooks import Patch

__all__ = ["NoSync", "load_handle", "save_handle"]


class NoSync(Patch):
    """Stands as `no_sync` in a model, where frameworks look for that of DDP. Copies of the model do not have it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self) -> AbstractContextManager[None]:
        return self._handle.no_sync()

    def before_copy(self) -> None:
        """There is nothing to do."""


def save_handle(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Write this rank's state into the folder, as `gradwire-rank{r}.pt`. Every rank calls it, between steps."""
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    write_whole(make_folder(folder) / _name(handle), file.getvalue())


def load_handle(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Take up what ranks wrote into the folder. Every rank calls it, between steps.

    A rank reads its own file; where another number of ranks saved, all files. Without any file residuals begin at zero, with a
    warning. Raises ValueError where a file does not fit the handle.
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


def _name(handle: Handle) -> str:
    group = handle.session.group
    return f"gradwire-rank{group.global_ranks[group.rank]}.pt"
