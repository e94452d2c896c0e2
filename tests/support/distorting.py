"""Codecs that distort gradients, for tests of the witness."""

from typing import Any, ClassVar

import torch
from torch import Tensor

import gradwire as gw
from benchmarks.accuracy.levels import Levels, LevelsCompressor

__all__ = ["DISTORTING", "HONEST"]


class Scaled(Levels, frozen=True):
    """Levels whose scale is wrong by a factor, in encode and decode alike."""

    id: ClassVar[str] = "scaled_levels"
    compressor: ClassVar[Any] = lambda spec: ScaledCompressor(spec)

    factor: float = 1.0


class ScaledCompressor(LevelsCompressor):
    spec: Scaled

    def _fitted(self, size: Tensor) -> tuple[Tensor, Tensor]:
        scale = (super()._fitted(size)[0].float() * self.spec.factor).bfloat16()
        numbers = torch.zeros_like(size)
        for edge in self._edges:
            numbers += size > scale.float() * edge
        return scale, numbers


DISTORTING = {
    "halved": gw.ErrorFeedback(Scaled(4, factor=0.5)),
    "doubled": gw.ErrorFeedback(Scaled(4, factor=2.0)),
    "max": gw.ErrorFeedback(gw.QSGD(bits=2, scale="max")),
}
HONEST = {
    "weighted": gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20),
    "4 bits": gw.QSGD(bits=4),
}
