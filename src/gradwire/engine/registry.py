"""Which models are parallelized."""

import weakref
from collections.abc import Iterable

import torch


class Registry:
    """Keeps handles alive as long as their models."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()
        self._owned = torch.utils.weak.WeakIdKeyDictionary()

    def add(self, model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter], handle: object) -> None:
        self._handles[model] = handle
        for parameter in parameters:
            self._owned[parameter] = True

    def forget(self, model: torch.nn.Module | None, parameters: Iterable[torch.nn.Parameter]) -> object:
        """Returns the model's handle."""
        for parameter in parameters:
            self._owned.pop(parameter, None)
        return self._handles.pop(model, None) if model is not None else None

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a handle synchronises this parameter."""
        return parameter in self._owned


REGISTRY = Registry()
