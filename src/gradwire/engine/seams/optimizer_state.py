"""What an optimizer keeps of a part of a parameter."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["in_order", "part_of_state"]


def part_of_state(state: Mapping[str, Any], like: torch.Tensor, first: int, numel: int) -> dict[str, Any]:
    """What an optimizer keeps of a run of a parameter's elements, from what it keeps of all. `like` has the parameter's shape,
    and the strides in whose order elements count. Copies."""
    part = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == like.shape:
            part[key] = in_order(value, like)[first : first + numel].clone()
        else:
            part[key] = copy.deepcopy(value)
    return part


def in_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Its elements in the order in which those of `like` lie: a view where the strides are the same."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((like.numel(),), (1,))
