"""Helpers for handles inside frameworks: the model's `no_sync`, and all ranks' states in checkpoints."""

import gc
import io
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from gradwire.api import Handle
from gradwire.core import Plan, make_folder, write_whole
from gradwire.engine import SET, Patch, load_state
from gradwire.errors import CommunicationError, DisagreementError, StepStateError
from gradwire.exchange import Exchange
from gradwire.integrations.saved_files import OPTIMIZERS, begins_anew, file_of, read_saved, why_others_train
from gradwire.transport import agree

__all__ = [
    "NoSync", "all_objects", "from_bytes", "gather_states", "load_handle", "resume_together",
    "save_handle", "to_bytes",
]  # fmt: skip

_IN_MID_STEP, _FAILED = 0, -1
"""Sizes of states that a rank does not have."""
_DICTS = (dict, OrderedDict, Counter)


class NoSync(Patch):
    """Replaces DDP's `no_sync` in a model, where frameworks look for it. Copies of the model do not have it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self) -> AbstractContextManager[None]:
        return self._handle.no_sync()

    def before_copy(self) -> None:
        """Do nothing."""


def save_handle(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Write this rank's state into the folder, as `gradwire-rank{r}.pt`. Call it on every rank, between steps.

    Where each rank has optimizer states of its own, they are in the file: frameworks save those of rank 0 alone.
    """
    session = handle.session
    state: dict[str, Any] = handle.state_dict()
    state[SET] = torch.tensor(list(session.lanes.name.encode()), dtype=torch.uint8)
    if session.schedule.traits.trains_alone:
        state[OPTIMIZERS] = [each.state_dict() for each in session.optimizers]
    write_whole(make_folder(folder) / file_of(handle), to_bytes(state))


def load_handle(handle: Handle, folder: str | os.PathLike[str], thaws: bool = False) -> None:
    """Take up what ranks wrote into the folder. Collective: every rank calls it, between steps. All ranks load, or none.

    A rank reads its own file. Where another number of ranks saved, a file is missing, or not all are of one save, it reads the
    files of all ranks that saved together. Files of an earlier save with more ranks are left out, with a warning. If no rank
    finds a file, residuals begin at zero, with a warning. Call it when the framework has loaded its optimizers: states that
    each rank has of its own take their place. thaws: callbacks may freeze and thaw layers. Where other tensors were trainable,
    nothing is loaded then, with a warning.

    Raises ValueError on all ranks if only some find a file, if one does not fit the handle, and if they were not saved together.
    """
    own: list[Any] = []
    why = ""

    def read() -> dict[str, Any] | None:
        nonlocal why
        state = read_saved(handle, folder)
        if thaws and (why := why_others_train(handle, state)):
            return None
        own.extend((state or {}).pop(OPTIMIZERS, ()))
        return state

    if load_state(handle.session, read):
        for optimizer, state in zip(handle.session.optimizers, own, strict=False):
            optimizer.load_state_dict(state)
    elif why:
        warnings.warn(begins_anew(folder, why), stacklevel=3)
    else:
        warnings.warn(
            f"{folder} has no gradwire-rank*.pt: it was saved without gradwire, or by another node. Residuals begin at zero.",
            stacklevel=3,
        )


def all_objects() -> list[Any]:
    """All objects that the garbage collector knows, those too that `gc.freeze` hides."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    for _ in range(3):  # what is garbage now would be frozen for good; some is found only when C++ has let go of it
        gc.collect()
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found


def resume_together(
    exchange: Exchange, state: Mapping[str, Any], others: Mapping[str, Any] | None = None, plan: Plan | None = None
) -> None:
    """Load a state into an exchange that was just made; an empty one changes nothing. Collective: all ranks load states of one
    step, or all raise. `others`: facts that must be the same on all ranks, too. `plan`: that of the state, where the exchange has
    another. Raises what `Exchange.change_to` and `Exchange.load_state_dict` do, and DisagreementError on the other ranks."""
    problem = None
    try:
        if plan is not None:
            exchange.change_to(plan)
        if state:
            exchange.load_state_dict(state)
    except Exception as error:  # the other ranks wait for this one
        problem = error
    digest = "" if plan is None else plan.digest()
    facts = {"step of the state that was loaded": exchange.step, "plan of the state that was loaded": digest, **(others or {})}
    facts |= {"error": str(problem)} if problem else {}
    lanes = exchange.lanes
    job = partial(agree, facts=facts, global_ranks=exchange.group.global_ranks)
    try:
        with lanes.told("all ranks to compare the states that they loaded", exchange.step):
            lanes.control.submit(job).result()
    except DisagreementError:
        exchange.close()
        if problem is not None:
            raise problem from None
        raise


def gather_states(handle: Handle, kept: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The states of all ranks in one dictionary on the first rank of the handle's group, on the CPU; nothing on the others.
    Collective, between steps. kept: this rank's, where the handle is detached.

    Raises StepStateError on all ranks if some are in the middle of a step. If a state failed for another reason, its rank raises
    that error, and others CommunicationError."""
    group, device = handle.session.group, handle.session.device
    data, problem = b"", None
    try:
        data = to_bytes(handle.state_dict() if kept is None else kept)
    except Exception as error:  # the other ranks wait for this one
        problem = error
    own = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8).to(device)
    size = len(data) if problem is None else _IN_MID_STEP if isinstance(problem, StepStateError) else _FAILED
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in group.global_ranks]
    dist.all_gather(sizes, torch.tensor([size], device=device), group=group.process_group)
    worst = min(int(each) for each in sizes)
    if problem is not None and size == worst:
        raise problem
    if worst <= 0:
        failed = next(rank for rank, each in zip(group.global_ranks, sizes, strict=True) if int(each) == worst)
        raise (StepStateError if worst == _IN_MID_STEP else CommunicationError)(
            f"rank {failed} could not save its state, and a checkpoint without it could not be resumed. See its log."
        )
    longest = max(int(each) for each in sizes)
    padded = torch.nn.functional.pad(own, (0, longest - len(own)))
    rows = [torch.empty_like(padded) for _ in sizes] if group.rank == 0 else None
    dist.gather(padded, rows, dst=group.global_ranks[0], group=group.process_group)
    states: dict[str, torch.Tensor] = {}
    for row, each in zip(rows or (), sizes, strict=False):
        states |= from_bytes(row[: int(each)].cpu().numpy().tobytes())
    return states


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """The bytes of `torch.save` for a state. Numbers of numpy, such as learning rates or milestones of a scheduler,
    become Python's: numpy's are not read without unpickling."""
    file = io.BytesIO()
    torch.save(_with_plain_numbers(state), file)
    return file.getvalue()


def _with_plain_numbers(state: Any) -> Any:
    """The state with Python's numbers in place of numpy's, in keys too."""

    def plain(each: Any) -> Any:
        if type(each) in _DICTS:
            return type(each)({plain(key): _with_plain_numbers(value) for key, value in each.items()})
        return each.item() if isinstance(each, np.number | np.bool_) else each

    return pytree.tree_map(plain, state, is_leaf=lambda each: type(each) in _DICTS)


def from_bytes(data: bytes) -> dict[str, Any]:
    """The state from the bytes of `to_bytes`, on the CPU."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state
