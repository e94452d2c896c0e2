"""Hearing of every `optimizer.step()` of the process, whichever optimizer it is: torch's hook for all of them."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer


class Hearer(Protocol):
    """Who is told."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A script asks for a step, which has not begun."""
        ...


_HEARERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_own = threading.local()


def hear(hearer: Hearer) -> None:
    """Tell it of every step from now on, as long as it lives."""
    _HEARERS.add(hearer)
    if announce not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(announce)


def hear_no_more(hearer: Hearer) -> None:
    """Tell it of nothing from now on."""
    _HEARERS.discard(hearer)


def announce(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The hook. Steps inside `own_steps` are gradwire's, and were announced when the script asked for them."""
    if not torch.compiler.is_compiling() and not getattr(_own, "inside", False):
        for hearer in list(_HEARERS):
            hearer.before_step(optimizer)


@contextmanager
def own_steps() -> Iterator[None]:
    """Tell nobody of the steps inside."""
    before, _own.inside = getattr(_own, "inside", False), True
    try:
        yield
    finally:
        _own.inside = before
