"""How a script calls its optimizers: some schedules step the optimizers themselves, which not every script allows."""

from collections.abc import Iterable
from typing import Any

import torch

from gradwire.engine.seams.hooks import ModelHook

__all__ = ["Stepped"]


class Stepped:
    """Watches the steps of optimizers until `remove`."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._handles: list[Any] = []
        self._seen = False
        self.problem = ""
        """Why gradwire cannot step the optimizers; '' if it can."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_pre_hook(ModelHook(self, Stepped._steps)))
            else:
                self.problem = f"{type(optimizer).__name__} is no torch.optim.Optimizer, so its steps cannot be watched"

    def _steps(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._seen = True
        name = type(optimizer).__name__
        if any(argument is not None for argument in [*arguments[1:], *named.values()]):
            self.problem = f"{name}.step is called with a closure, which runs backward inside the step"
        elif getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            self.problem = f"a GradScaler unscales gradients inside {name}.step"

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        if self._handles and not self._seen and not self.problem:
            self.problem = "the script did not call step() of the optimizers that it passed"
        self._handles = []
