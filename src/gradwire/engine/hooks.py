"""Hooks on the model that neither keep the handle alive nor travel with copies of the model.

`torch.save(model)`, `pickle` and `copy.deepcopy` take a module apart by its class's reducer. One is registered for the
class of every parallelized model that leaves gradwire's hooks out: what was saved or copied is an ordinary model, and
loads where gradwire is not installed.
"""

import copyreg
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ModelHook", "leave_hooks_behind"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class ModelHook:
    """Calls act(owner, ...) as long as the owner lives, and then does nothing."""

    def __init__(self, owner: Any, act: Callable[..., None]) -> None:
        self._owner, self._act = weakref.ref(owner), act

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._act(owner, *arguments)


def leave_hooks_behind(model: torch.nn.Module) -> None:
    """From now on copies and pickles of modules of this class are without ModelHooks."""
    reduce = copyreg.dispatch_table.get(type(model))
    if not isinstance(reduce, _Reducer):
        copyreg.pickle(type(model), _Reducer(reduce))


class _Reducer:
    """What the class's own reducer returns, without our hooks."""

    def __init__(self, before: Callable[[Any], Any] | None) -> None:
        self._before = before

    def __call__(self, model: torch.nn.Module) -> Any:
        reduced = self._before(model) if self._before else model.__reduce_ex__(2)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            state = dict(reduced[2])
            for name in _HOOKS:
                if name in state:
                    state[name] = OrderedDict(
                        (key, hook) for key, hook in state[name].items() if not isinstance(hook, ModelHook)
                    )
            reduced = (*reduced[:2], state, *reduced[3:])
        return reduced
