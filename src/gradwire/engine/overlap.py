"""How much of backward passes before its first gradient is there: nothing can be sent in that time."""

import statistics
import time
import warnings
from collections.abc import Iterable

import torch

_STEPS = 20
_MOST = 0.8


class FirstGradient:
    """Watches the first steps, and warns once where a model that was compiled as a whole leaves nothing to overlap."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self._began: float | None = None

    def expect(self, outputs: Iterable[torch.Tensor]) -> None:
        """A backward from these will follow."""
        self._began = None
        if len(self.shares) < _STEPS:
            for output in outputs:
                output.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    def ended(self, first_s: float, end_s: float, model: torch.nn.Module | None) -> None:
        """A step whose first gradient came at `first_s` and whose backward ended at `end_s` (time.perf_counter)."""
        if self._began is None or not self._began <= first_s <= end_s:
            return
        self.shares.append((first_s - self._began) / max(end_s - self._began, 1e-9))
        self._began = None
        if len(self.shares) == _STEPS and self.median > _MOST and model is not None and compiled(model):
            warnings.warn(
                f"{100 * self.median:.0f} % of backward passes before the first gradient is there, and nothing can be sent "
                "meanwhile: the model is compiled as a whole. Compile its blocks one by one to overlap communication: "
                "for block in model.blocks: block.compile().",
                stacklevel=2,
            )

    @property
    def median(self) -> float:
        """0 before the first step."""
        return statistics.median(self.shares) if self.shares else 0.0


def compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile made this module, or was told to compile it in place."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
