"""The two exchanges of the `delayed` schedule: of usual steps, and of corrections, in the same flat buffers.

Steps of the warm-up are corrections without a spec: they send gradients as they are (CD-SGD, algorithm 1).
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from gradwire.core.schedules import Delayed
from gradwire.exchange import Exchange
from gradwire.exchange.layout import BucketBuffers
from gradwire.exchange.memory import Remembered
from gradwire.exchange.plans import info_of
from gradwire.planner.schemes import correction_plan


class Corrections:
    """Which buckets a step uses, and what becomes of residuals in corrections."""

    def __init__(
        self,
        schedule: Delayed,
        usual: Exchange,
        parameters: Mapping[str, torch.nn.Parameter],
        step: int,
        before: "Corrections | None" = None,
    ) -> None:
        """Make the exchange of corrections, as it is in this step, beside the usual one. What was remembered is kept."""
        self.schedule = schedule
        self._usual, self._parameters = usual, parameters
        self._corrected: Exchange | None = None
        self._kept_back: dict[str, torch.Tensor] = {}
        """What compressors remembered before residuals were flushed into a step, until it counts."""
        self._warming = warming = step < schedule.warmup_steps
        if schedule.k is None and not warming:
            return
        sent = msgspec.structs.replace(schedule, correction=None) if warming else schedule
        plan = correction_plan(usual.plan, sent, [info_of(*item) for item in parameters.items()])
        self._corrected = made = Exchange.on(usual.lanes, parameters, plan, step, usual.flats)
        if before is not None and before.memory is not None:
            made.memory.take_over(made.memory.fitting(before.memory.carried()))

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
        return self._corrected.buckets, 1 / self.schedule.k

    def at_step(self, step: int, keep: bool = False) -> "Corrections":
        """These, or where they are others in that step, new ones. They remember nothing but what they are to `keep`."""
        if not self.outdated(step):
            return self
        return Corrections(self.schedule, self._usual, self._parameters, step, self if keep else None)

    def outdated(self, step: int) -> bool:
        """Whether in this step the correction's spec is another one than in the step its buckets were made for, or in only one
        of the two there are any."""
        if (step < self.schedule.warmup_steps) != self._warming:
            return self.schedule.correction is not None or self.schedule.k is None
        return self._corrected is not None and self._corrected.outdated(step)

    def exchange_of(self, step: int) -> Exchange:
        """What a step runs: in the warm-up, and when its count is a multiple of k, the exchange of corrections."""
        count, k = step - self.schedule.warmup_steps, self.schedule.k
        if self._corrected is not None and (count < 0 or (k is not None and count % k == 0)):
            return self._corrected
        return self._usual

    def add_residuals(self, exchange: Exchange, names: Iterable[str]) -> None:
        """If corrections flush, add to these gradients of one what error feedback kept back of them, and forget it. See
        docs/papers/cd-sgd.md."""
        if not self.schedule.flush or exchange is self._usual:
            return
        carried = self._usual.memory.carried()
        self._kept_back = dict(carried)
        for name in names:
            slot = exchange.slots[name]
            if (residual := carried.pop(f"residual/{name}", None)) is not None:
                placed = slot.in_memory(residual)
                exchange.flats[slot.bucket][slot.offset : slot.offset + placed.numel()] += placed
        self._usual.memory.take_over(carried)

    def landed(self, counts: bool, taken_back: bool = False) -> None:
        """A step is over. If it does not count, residuals are what they were, but for those that are `taken_back`, with the
        gradient that they were added to, into what corrections remember."""
        if self._kept_back and not counts:
            theirs = set(self.memory.names()) if taken_back and self.memory is not None else set()
            restored = {key: value for key, value in self._kept_back.items() if key.partition("/")[2] not in theirs}
            self._usual.memory.take_over(self._usual.memory.carried() | restored)
        self._kept_back = {}
