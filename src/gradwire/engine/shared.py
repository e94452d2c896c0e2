"""What of a model all ranks share: everything but what the script set aside, as it does for DDP."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def shared_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By name, without those that `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` names: experts that only
    this rank has."""
    return _shared(model, model.named_parameters())


def shared_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """As `shared_parameters`."""
    return [buffer for _, buffer in _shared(model, model.named_buffers())]


def shared_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, frozen ones too, and buffers."""
    return [*(parameter for _, parameter in shared_parameters(model)), *shared_buffers(model)]


def _shared(model: torch.nn.Module, named: Iterable[tuple[str, _Tensor]]) -> Iterator[tuple[str, _Tensor]]:
    own = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return ((name, tensor) for name, tensor in named if name not in own)
