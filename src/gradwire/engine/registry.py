"""Which models are parallelized."""

from collections.abc import Iterable

import torch

from gradwire.engine.torch_hooks.hooks import Patch

_HANDLE = "_gradwire_handle"


class Keeps(Patch):
    """Stands in a model's `__dict__` and keeps its handle, or another object that trains it. Copies of the model have none.

    The model itself keeps the handle, not a table: an error that was raised holds the frames of the script, and so the model.
    Where the handle holds such an error, the two are garbage together, which a table of handles would keep for ever.
    """

    def __init__(self, handle: object) -> None:
        self.handle = handle

    def before_copy(self) -> None:
        """Nothing of it is copied."""

    def __deepcopy__(self, _: object) -> "Keeps":
        # for classes whose copies `leave_hooks_behind` does not see to
        return Keeps(None)


class Registry:
    """Keeps handles alive as long as their models."""

    def __init__(self) -> None:
        self._owned = torch.utils.weak.WeakIdKeyDictionary()

    def add(self, model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter], handle: object) -> None:
        vars(model)[_HANDLE] = Keeps(handle)
        for parameter in parameters:
            self._owned[parameter] = True

    def forget(self, model: torch.nn.Module | None, parameters: Iterable[torch.nn.Parameter]) -> object:
        """Returns the model's handle."""
        for parameter in parameters:
            self._owned.pop(parameter, None)
        kept = vars(model).pop(_HANDLE, None) if model is not None else None
        return kept.handle if kept is not None else None

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a handle synchronises this parameter."""
        return parameter in self._owned


REGISTRY = Registry()
