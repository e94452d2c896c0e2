"""Reading the files that ranks saved, in `gradwire.integrations.handles`: of all of them only those that a rank needs."""

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradwire.api import Handle
from gradwire.engine import SET, told_by_all
from gradwire.transport import Group

__all__ = ["OPTIMIZERS", "begins_anew", "file_of", "read_saved", "why_others_train"]

OPTIMIZERS = "optimizers"
"""The entry of a file for the states of this rank's optimizers, where each rank has its own."""


def file_of(handle: Handle) -> str:
    """The name of this rank's file."""
    group = handle.session.group
    return f"gradwire-rank{group.global_ranks[group.rank]}.pt"


def read_saved(handle: Handle, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the part of the files in the folder that this rank takes up, as `load_handle` says; None without any. Collective.
    States of optimizers come only from this rank's own file, of a save by the same ranks."""
    device, group = handle.session.device, handle.session.group
    own, load = Path(folder) / file_of(handle), partial(torch.load, weights_only=True, mmap=True)
    state, save = dict[str, Any](), None
    with suppress(Exception):  # all ranks compare what they found, and then it is raised below
        if own in (files := _files(folder)) and len(files) == group.world_size:
            state = load(own, map_location=device)
            save = _save_of(state)
    digest = hashlib.sha256(repr(save).encode()).digest()
    told = told_by_all(handle.session, digest, "all ranks to compare the files that they found")
    if save is not None and save[0] == group.global_ranks and all(each == told[0] for each in told):
        return state
    states: dict[Path, dict[str, Any]] = {path: load(path, map_location="cpu") for path in _files(folder)}
    together = _saved_together(folder, states)
    if own in together and _ranks_of(states[own]) == group.global_ranks:
        return _moved(states[own], device)
    taken = dict[str, Any]()
    for at, path in enumerate(together):
        taken |= _part(at, states[path], group, device)
    return taken or None


def why_others_train(handle: Handle, state: Mapping[str, Any] | None) -> str:
    """Why a state does not fit the handle, where other tensors were trainable when it was saved; or ''."""
    orders = (value for key, value in (state or {}).items() if key.startswith("rank") and key.endswith("/order"))
    then, now = len(next(orders, ())), len(handle.session.order)
    if not then or then == now:
        return ""
    return f"was saved with {then} trainable tensors, and {now} are trainable now: a callback freezes and thaws layers"


def begins_anew(checkpoint: object, why: str) -> str:
    """The warning of a run that resumes without its state."""
    return f"{checkpoint} {why}. Residuals begin at zero, and plan='auto' decides anew."


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    return sorted(Path(folder).glob("gradwire-rank*.pt"))


def _part(at: int, state: Mapping[str, Any], group: Group, device: torch.device) -> Mapping[str, Any]:
    """The state of a rank, on the device if this rank takes it. The others stay in the files, and so do optimizers."""
    state = {key: value for key, value in state.items() if key != OPTIMIZERS}
    ranks, taken = _ranks_of(state) or (), at == 0
    taken |= any(f"rank{rank}/step" in state for rank in (*ranks[group.rank :: group.world_size], group.global_ranks[group.rank]))
    return _moved(state, device) if taken else state


def _ranks_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ranks that saved together with the one whose state it is."""
    ranks = next((value for key, value in state.items() if key.startswith("rank") and key.endswith("/ranks")), None)
    return None if ranks is None else tuple(ranks.tolist())


def _save_of(state: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, int, bytes]:
    """The save that a state is of: its ranks, step and job."""
    step = next((int(value) for key, value in state.items() if key.startswith("rank") and key.endswith("/step")), -1)
    return _ranks_of(state), step, bytes(state[SET].tolist()) if SET in state else b""


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _saved_together(folder: str | os.PathLike[str], states: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """The files of one save: all files, unless those of one save are whole and others are left of an earlier one."""
    sets: dict[Any, list[Path]] = {}
    for path, state in states.items():
        sets.setdefault(_save_of(state), []).append(path)
    whole = [(key, paths) for key, paths in sets.items() if key[0] is not None and len(paths) == len(key[0])]
    if len(sets) < 2 or len(whole) != 1:
        return [*states]
    (((ranks, step, _), paths),) = whole
    warnings.warn(
        f"{folder} has gradwire-rank*.pt of an earlier save, beside those of step {step} of {len(ranks)} ranks. Left out: "
        f"{', '.join(path.name for path in states if path not in paths)}. Remove them.",
        stacklevel=5,
    )
    return paths
