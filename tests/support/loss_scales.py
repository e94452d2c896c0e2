"""Losses that a GradScaler scales by another number in each step, and what is left of its scale in means and residuals."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["SCALES", "scaled_steps", "unscaled"]

SCALES = (2.0**12, 2.0**8, 2.0**10)
"""Of the steps. A division by powers of two changes no bit."""


def scaled_steps(scaled: bool) -> Iterator[tuple[int, Callable[[Any], Any], float]]:
    """The number of each step, what scales its loss, and the scale. Without `scaled` the scaler is off."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[0], enabled=scaled)
    for step, scale in enumerate(SCALES):
        if step:
            scaler.update(scale)
        yield step, scaler.scale, scale if scaled else 1.0


def unscaled(state: Mapping[str, torch.Tensor], scaled: bool) -> list[torch.Tensor]:
    """The residuals and energies of a state that was saved after the last step, as they are without a scale."""
    scale = SCALES[-1] if scaled else 1.0
    powers = {key: 2 if "/energy/" in key else 1 for key in sorted(state) if "/residual" in key or "/energy/" in key}
    assert powers
    return [state[key].float() / scale**power for key, power in powers.items()]
