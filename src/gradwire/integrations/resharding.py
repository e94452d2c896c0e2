"""Residuals that another number of ranks saved under FSDP2, put together by parameter.

A saved buffer holds the shards of parameters. FSDP2 cuts a parameter along its first dimension and pads the last shards with
zeros. So the shards one after another are the whole parameter, and any number of ranks can cut it again.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.exchange import SHARED, added_up

__all__ = ["ALL_RANKS", "whole_residuals"]

ALL_RANKS = -1

_MEMORY = re.compile(r"rank\d+/(\w+/(?:[0-3]|left)/.+)", re.DOTALL)
_ALIKE = (SHARED, "energy")
"""Values that are the same on all ranks and belong to one cut of the tensors: they begin anew."""


def whole_residuals(saved: Mapping[int, Mapping[str, Any]], rank: int, size: int) -> dict[str, Tensor]:
    """Return `{what}/{parameter}`: the residuals of a module that one rank of a group of `size` ranks takes, flat, with padding.

    saved: the state of the module's packs on each global rank that saved. Between the replicas of HSDP, as in
    `gradwire.exchange.states`, the rank takes the residuals of all whose position in the group that saved was rank, rank + size,
    .. . Else each rank gets the sum of all, and takes the part of one shard. So the sum is kept.
    """
    groups = sorted({tuple(pack[2]) for state in saved.values() for pack, _ in state["packs"]})
    shards: dict[str, dict[int, Tensor]] = {}
    for other, state in saved.items():
        ranks = next((group for group in groups if other in group), (other,))
        for key, at, part in _parts(state):
            if at is None and ranks.index(other) % size != rank:
                continue
            place = at if at is not None else groups.index(ranks)
            found = shards.setdefault(key, {})
            found[place] = found[place] + part if place in found else part.clone()
    wholes = {}
    for key, found in shards.items():
        count, first = 1 + max(found), next(iter(found.values()))
        wholes[key] = torch.cat([found.get(place, torch.zeros_like(first)) for place in range(count)])
    uncut = dict(state["wholes"] for state in saved.values() if "wholes" in state)
    for of, residuals in uncut.items():
        if of == ALL_RANKS or of % size == rank:
            for key, whole in residuals.items():
                wholes[key] = _sum(wholes[key], whole) if key in wholes else whole
    return wholes


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two parameters' residuals, of which one may have more padding at its end."""
    short, long = sorted((first, second), key=len)
    return long + torch.nn.functional.pad(short, (0, len(long) - len(short)))


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield `{what}/{parameter}`, the number of the shard, and its residual. The number is None between the replicas of HSDP,
    where a rank has one shard."""
    for pack, saved in state["packs"]:
        names, numels, *_ = pack
        memory = {match[1]: value for key, value in saved.items() if (match := _MEMORY.fullmatch(key))}
        for key, value in added_up([memory]).items():
            what, _, tensor = key.partition("/")
            place = int(tensor.rpartition("/")[2]) if "/" in tensor else None
            if what not in _ALIKE:
                for name, part in zip(names, value.split(list(numels)), strict=True):
                    yield f"{what}/{name}", place, part
    several = any("/" in key.split("/", 3)[3] for _, saved in state["packs"] for key in saved if _MEMORY.fullmatch(key))
    for key, part in state["kept"].items():
        what, at, name = key.split("/", 2)
        if what not in _ALIKE:
            yield f"{what}/{name}", int(at) if several else None, part
