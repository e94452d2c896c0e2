"""Steps of which a part is left out, to measure the rest: the phases of DeAR's Fig. 8, and an exchange alone.

Nothing in the engine knows of this. A chunk that runs in two phases gets another class here, in which the phase that is left
out sends nothing and computes nothing. What is trained that way is wrong on purpose.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.campaigns.parts import EXCHANGE_ONLY, part_of_step
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.methods import Gradwire
from gradwire.collectives import TwoPhase
from gradwire.errors import StepStateError
from gradwire.exchange import Exchange
from gradwire.transport import Link, Meter
from gradwire.transport.streams import Mark

__all__ = ["PartOfStep", "exchange_alone", "keep_only"]

SUMS_IN_A_ROW = 8
"""Exchanges of what the exchange before has left. Each multiplies it by up to the number of ranks."""


class ReduceOnly(TwoPhase):
    """The reduce phase alone: every rank ends with its shard of the sum and does not send it. All other gradients stay
    each rank's own."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        super().post(link, tag, (0,))

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0:
            super().run(phase, link, meter, ready)


class GatherOnly(TwoPhase):
    """Every rank's own shard stands for the sum, and all ranks get all shards."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        super().post(link, tag, (1,))

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0:
            self.take_shard(link.streams)
        else:
            super().run(phase, link, meter, ready)


class ComputeOnly(TwoPhase):
    """Neither phase."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        pass


KEPT: dict[str, type[TwoPhase]] = {"reduce-only": ReduceOnly, "gather-only": GatherOnly, "compute-only": ComputeOnly}


def keep_only(part: str, exchange: Exchange) -> None:
    """Let these buckets do only this part of their exchange from the next step on. Call it on all ranks, between steps.

    Raises StepStateError with the name of a bucket without two phases.
    """
    for buffers in exchange._buckets:
        for chunk in buffers.chunks:
            if not isinstance(chunk, TwoPhase):
                raise StepStateError(
                    f"bucket {buffers.index} runs {', '.join(buffers.bucket.option)}: only an exchange in two phases, alltoall "
                    f"and allgather, can run {part}. Give the policy the scheme alltoall."
                )
            chunk.__class__ = KEPT[part]


def exchange_alone(exchange: Exchange, number: int) -> None:
    """Exchange all buckets while nothing else runs, and wait for the exchange. Call it on all ranks, between steps.

    number: the place of the exchange in a row, from 0. It sends the values that the exchange before has left in the
    buckets, or new random numbers.
    """
    fresh, generator = number % SUMS_IN_A_ROW == 0, torch.Generator().manual_seed(number)
    buckets = list(exchange.layouts())
    apart = [(slot, lent) for slots, _, _, lent in buckets if lent is not None for slot in slots]
    values = [slot.empty().normal_(generator=generator) if fresh else lent.of(slot) for slot, lent in apart]
    for bucket in buckets if fresh else ():
        bucket.flat.normal_(generator=generator)
    exchange.begin(step=exchange.step)
    for (slot, lent), tensor in zip(apart, values, strict=True):
        lent.lend(slot, tensor)
    for bucket in buckets:
        exchange.ready(bucket.slots)
    exchange.wait()


class PartOfStep(Gradwire):
    """gradwire with only a part of each step, one of `parts.PARTS`. What it trains is wrong on purpose."""

    wrong_on_purpose = True

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None, name: str) -> None:
        self.part, policy = part_of_step(name)
        super().__init__(job, seed, process_group, policy, drift_check_steps=0)  # ranks drift apart, as they must
        self._steps_done = 0

    def step(self, batch: Batch) -> float:
        """A step without the rest. Of exchange-only the first is a whole one, and the others compute nothing at all."""
        # of the last step: a policy's plan may have been made anew since
        exchange = self.handle.session.reducer.running
        self._steps_done += 1
        if self.part != EXCHANGE_ONLY:
            keep_only(self.part, exchange)
            return super().step(batch)
        if self._steps_done == 1:
            return super().step(batch)
        if self._steps_done == 2:
            self.settle()
            self.forward_us = self.backward_us = 0.0
        exchange_alone(exchange, self._steps_done - 2)
        return 0.0

    @property
    def bytes_planned(self) -> int | None:
        return super().bytes_planned if self._usual_exchange() else None

    def codec_seconds(self) -> float | None:
        return super().codec_seconds() if self._usual_exchange() else None

    def _usual_exchange(self) -> bool:
        """Whether all of a usual step's exchange ran, and no correction."""
        return self.part == EXCHANGE_ONLY and self.handle.session.reducer.running is self.handle.session.exchange

    def record(self, folder: Path) -> None:
        """Nothing that is wrong on purpose becomes the record of a training run."""
