"""The exchanges of the `delayed` schedule, in the same flat buffers: of usual steps, and of steps that correct buckets.

Steps of the warm-up correct all buckets, without a spec: they send gradients as they are (CD-SGD, algorithm 1).
"""

from collections.abc import Iterable, Mapping

import msgspec
import torch

from gradwire.core import Delayed
from gradwire.exchange import Exchange, Remembered, info_of
from gradwire.plan import correction_plan, with_buckets


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
        """Make the buckets of corrections, as they are in this step, beside the usual ones. What was remembered is kept."""
        self.schedule = schedule
        self._usual, self._parameters = usual, parameters
        self._last: Exchange | None = None
        """What ran the last step, if that is known."""
        self._corrected: Exchange | None = None
        self._made: dict[tuple[int, ...], Exchange] = {(): usual}
        """What runs a step, by the buckets that it corrects."""
        self._kept_back: dict[str, torch.Tensor] = {}
        """What compressors remembered of corrected buckets before residuals were flushed into a step, until it counts."""
        self._warming = warming = step < schedule.warmup_steps
        self._everything = tuple(range(len(usual.numels)))
        self._chosen_in = schedule.corrected(usual.compressed_bytes)
        if schedule.k is None and not warming:
            return
        sent = msgspec.structs.replace(schedule, correction=None) if warming else schedule
        plan = correction_plan(usual.plan, sent, [info_of(*item) for item in parameters.items()])
        self._corrected = made = Exchange.on(usual.lanes, parameters, plan, step, usual.flats)
        self._made[self._everything] = made
        if before is not None and before._corrected is not None:
            made.keep_residuals_of(before._corrected)

    @property
    def memory(self) -> Remembered | None:
        """Of corrections, if there are any."""
        return self._corrected.residuals if self._corrected is not None else None

    @property
    def correcting(self) -> tuple[Exchange | None, float]:
        """The exchange of corrections, and the part of all steps after the warm-up that use each of them. None before there are
        any."""
        others = self._warming and self.schedule.correction is not None
        if self._corrected is None or self.schedule.every is None or others:
            return None, 0.0
        return self._corrected, 1 / self.schedule.every

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
        """What runs a step: the usual buckets, but for those that the step corrects. The warm-up corrects all."""
        count = step - self.schedule.warmup_steps
        chosen = self._everything if count < 0 else self._chosen_in[count % len(self._chosen_in)]
        if chosen not in self._made:
            assert self._corrected is not None, "a step corrects, and nothing was made for it"
            buckets = [
                (self._corrected if index in chosen else self._usual).plan.buckets[index] for index in self._everything
            ]
            plan = with_buckets(self._usual.plan, buckets)
            self._made[chosen] = self._usual.mixed_with(self._corrected, chosen, plan)
        runs = self._made[chosen]
        if runs is not self._last:
            runs.take_turn()
        self._last = runs
        return runs

    def add_residuals(self, exchange: Exchange, names: Iterable[str]) -> None:
        """If corrections flush, add to these gradients what error feedback kept back of them, where their bucket is corrected in
        this step, and forget it. See docs/papers/cd-sgd.md."""
        if not self.schedule.flush or exchange is self._usual:
            return
        corrected = self._usual.residuals_replaced_in(exchange)
        carried = corrected.carried()
        self._kept_back = dict(carried)
        for name in names:
            slot = exchange.slots[name]
            if (residual := carried.pop(f"residual/{name}", None)) is not None:
                placed = slot.in_memory(residual)
                exchange.flats[slot.bucket][slot.offset : slot.offset + placed.numel()] += placed
        corrected.take_over(carried)

    def landed(self, counts: bool, taken_back: bool = False) -> None:
        """A step is over. If it does not count, residuals are what they were, but for those that are `taken_back`, with the
        gradient that they were added to, into what corrections remember."""
        if self._kept_back and self._last is not None and not counts:
            theirs = set(self.memory.names()) if taken_back and self.memory is not None else set()
            restored = {key: value for key, value in self._kept_back.items() if key.partition("/")[2] not in theirs}
            corrected = self._usual.residuals_replaced_in(self._last)
            corrected.take_over(corrected.carried() | restored)
        self._kept_back = {}
