"""The two sets of buckets of the `delayed` schedule: of usual steps, and of corrections, in the same flat buffers.

Steps of the warm-up are corrections without a spec: they send gradients as they are (CD-SGD, algorithm 1).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from gradwire.collectives import Group
from gradwire.core.schedules import Delayed as DelayedSchedule
from gradwire.core.tensors import TensorInfo
from gradwire.engine.assembly import Assembly, assemble
from gradwire.engine.executor import Executor
from gradwire.engine.layout import BucketBuffers, Slot
from gradwire.engine.memory import Remembered
from gradwire.planner.corrections import correction_plan

__all__ = ["Corrections", "Side"]


class Side(NamedTuple):
    """One of the two."""

    executor: Executor
    random: torch.Tensor
    slots: list[Slot]
    """In the order of the parameters."""
    memory: Remembered


class Corrections:
    """Which buckets a step uses, and what becomes of residuals in corrections."""

    def __init__(
        self,
        schedule: DelayedSchedule,
        usual: Side,
        parameters: Mapping[str, torch.nn.Parameter],
        group: Group,
        step: int,
        before: "Corrections | None" = None,
    ) -> None:
        """Make buckets of corrections, as they are in this step, beside these usual ones. What was remembered is kept."""
        self.schedule = schedule
        self._usual, self._parameters, self._group = usual, parameters, group
        self._corrected: Side | None = None
        self._built: Assembly | None = None
        self._kept_back: dict[str, torch.Tensor] = {}
        """What compressors remembered before residuals were flushed into a step, until it counts."""
        self._warming = warming = step < schedule.warmup_steps
        if schedule.k is None and not warming:
            return
        executor = usual.executor
        sent = msgspec.structs.replace(schedule, correction=None) if warming else schedule
        plan = correction_plan(executor.plan, sent, [_info(*item) for item in parameters.items()])
        flats = [buffers.flat for buffers in executor.buckets]
        self._built = built = assemble(plan, dict(parameters), group, executor.lanes, step, flats)
        if before is not None and before.memory is not None:
            built.memory.take_over(built.memory.fitting(before.memory.carried()))
        by_name = {slot.name: slot for buffers in built.executor.buckets for slot in buffers.slots}
        self._corrected = Side(built.executor, built.random, [by_name[name] for name in parameters], built.memory)

    @property
    def memory(self) -> Remembered | None:
        """Of corrections, if there are any."""
        return self._corrected.memory if self._corrected is not None else None

    @property
    def correcting(self) -> tuple[Sequence[BucketBuffers], float]:
        """The buckets of corrections, and the part of all steps after the warm-up that are some. None before there are any."""
        others = self._warming and self.schedule.correction is not None
        if self._corrected is None or self.schedule.k is None or others:
            return (), 0.0
        return self._corrected.executor.buckets, 1 / self.schedule.k

    def at_step(self, step: int, keep: bool = False) -> "Corrections":
        """These, or where they are others in that step, new ones. They remember nothing but what they are to `keep`."""
        if not self.outdated(step):
            return self
        return Corrections(self.schedule, self._usual, self._parameters, self._group, step, self if keep else None)

    def outdated(self, step: int) -> bool:
        """Whether in this step the correction's spec is another one than in the step its buckets were made for, or in only one
        of the two there are any."""
        if (step < self.schedule.warmup_steps) != self._warming:
            return self.schedule.correction is not None or self.schedule.k is None
        return self._built is not None and self._built.outdated(step)

    def side(self, step: int) -> Side:
        """The buckets that a step uses: in the warm-up, and when its count is a multiple of k, those of corrections (notes
        D43)."""
        count, k = step - self.schedule.warmup_steps, self.schedule.k
        if self._corrected is not None and (count < 0 or (k is not None and count % k == 0)):
            return self._corrected
        return self._usual

    def add_residuals(self, side: Side, indices: Iterable[int]) -> None:
        """If corrections flush, add to these gradients of one what error feedback kept back of them, and forget it (notes
        D44)."""
        if not self.schedule.flush or side is self._usual:
            return
        carried = self._usual.memory.carried()
        self._kept_back = dict(carried)
        for index in indices:
            slot = side.slots[index]
            if (residual := carried.pop(f"residual/{slot.name}", None)) is not None:
                placed = slot.in_memory(residual)
                side.executor.buckets[slot.bucket].flat[slot.offset : slot.offset + placed.numel()] += placed
        self._usual.memory.take_over(carried)

    def landed(self, counts: bool, taken_back: bool = False) -> None:
        """A step is over. If it does not count, residuals are what they were, but for those that are `taken_back`, with the
        gradient that they were added to, into what corrections remember."""
        if self._kept_back and not counts:
            theirs = set(self.memory.names()) if taken_back and self.memory is not None else set()
            restored = {key: value for key, value in self._kept_back.items() if key.partition("/")[2] not in theirs}
            self._usual.memory.take_over(self._usual.memory.carried() | restored)
        self._kept_back = {}


def _info(name: str, parameter: torch.nn.Parameter) -> TensorInfo:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(parameter.shape), dtype, "cpu" if parameter.device.type == "cpu" else "gpu")
