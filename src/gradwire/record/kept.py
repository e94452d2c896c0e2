"""The steps and the losses of a recording. Long runs keep every second, fourth, .. step."""

import contextlib
import math
from typing import Any

import msgspec
import torch

from gradwire.core import show
from gradwire.record.run import StepRecord

MOST_STEPS = 2000
"""The most recorded steps. Beyond, every second step is dropped, and only every second new step is kept."""


class KeptSteps:
    """At most `MOST_STEPS` steps, and the losses that the script logged."""

    def __init__(self) -> None:
        self.seen = 0
        """The number of steps so far, kept or not."""
        self._steps: list[StepRecord] = []
        self._losses: dict[int, Any] = {}
        self._every = 1

    def add(self, step: StepRecord) -> bool:
        """Add a step. Returns whether it is kept."""
        keep = self.seen % self._every == 0
        self.seen += 1
        if keep:
            self._steps.append(step)
        if len(self._steps) > MOST_STEPS:
            del self._steps[1::2]
            self._every *= 2
        return keep

    def lasted(self, step: int, us: float) -> None:
        """Set the time of the last step, if it has this number."""
        if self._steps and self._steps[-1].step == step:
            self._steps[-1] = msgspec.structs.replace(self._steps[-1], step_us=us)

    def log(self, step: int, loss: Any) -> None:
        """Keep the loss of a step: a real number or a tensor of one element. Raises ValueError for any other value."""
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss has shape {tuple(loss.shape)}: log one number a step, such as loss.mean().")
            if loss.is_complex():
                raise ValueError(f"loss is a tensor of {loss.dtype}: log a real number.")
            loss = loss.detach().clone()  # the script may overwrite its memory
        else:
            loss = _number(loss)
        self._losses[step] = loss
        if len(self._losses) > 2 * MOST_STEPS:
            kept = {each.step for each in self._steps} | {step}
            self._losses = {at: each for at, each in self._losses.items() if at in kept}

    def forget_from(self, step: int) -> None:
        """Drop this step and later ones."""
        self._steps = [each for each in self._steps if each.step < step]
        self._losses = {at: loss for at, loss in self._losses.items() if at < step}

    def records(self) -> tuple[StepRecord, ...]:
        """The steps with their losses; None for a loss that is not finite."""
        losses = {step: loss for step, loss in self._numbers().items() if math.isfinite(loss)}
        return tuple(msgspec.structs.replace(step, loss=losses.get(step.step)) for step in self._steps)

    def notes(self) -> tuple[str, ...]:
        """A sentence about losses that are not finite, if there are any."""
        lost = [step for step, loss in self._numbers().items() if not math.isfinite(loss)]
        return (f"The loss was not finite in {len(lost)} steps, first in step {lost[0]}.",) if lost else ()

    def _numbers(self) -> dict[int, float]:
        return {step: float(loss) for step, loss in self._losses.items()}


def _number(loss: object) -> float:
    if not isinstance(loss, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(loss)  # type: ignore[arg-type]
    raise ValueError(f"loss is {show(loss)}: log a real number, or a tensor of one element.")
