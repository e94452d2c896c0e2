"""The loss scale of a backward: what a `torch.amp.GradScaler` multiplied its loss by.

A scaler is not passed to gradwire. So `scale()` of the class is replaced once, and leaves a hook on the loss that it returns: the
first thing that a backward from the loss calls. A backward from several losses has the scale of the last one.
"""

import functools
import weakref
from typing import Any

import torch

from gradwire.engine.torch_hooks.hooks import tensors_in

_last: tuple[int, float] = (-1, 1.0)
"""The graph task of the last backward from a scaled loss, and its scale."""


def scale_of_this_backward() -> float | None:
    """The scale of the loss that the present backward began with; None if no scaler scaled it."""
    task = torch._C._current_graph_task_id()
    return _last[1] if task != -1 and task == _last[0] else None


def watch_scalers() -> None:
    """From now on backwards from scaled losses are known."""
    plain = torch.amp.GradScaler.scale
    if hasattr(plain, "_gradwire"):
        return

    @functools.wraps(plain)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled():
            for tensor in tensors_in(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_begins, weakref.ref(self)))
        return scaled

    scale._gradwire = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def _begins(scaler: "weakref.ref[torch.amp.GradScaler]", gradient: torch.Tensor) -> None:
    global _last
    if (living := scaler()) is not None:
        _last = torch._C._current_graph_task_id(), living.get_scale()
