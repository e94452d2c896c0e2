"""Steps of which a part is left out, to measure the rest: the phases of DeAR's Fig. 8 (notes D39), and an exchange alone.

Nothing in the engine knows of this. A chunk that runs in two phases gets another class here, in which the phase that is left
out sends nothing and computes nothing. What is trained that way is wrong on purpose.
"""

from collections.abc import Sequence

import torch

from gradwire.collectives import Link, Meter, TwoPhase
from gradwire.collectives.streams import Mark
from gradwire.errors import StepStateError
from gradwire.exchange import Exchange

__all__ = ["exchange_alone", "keep_only"]

SUMS_IN_A_ROW = 8
"""Exchanges of what the exchange before has left. Each multiplies it by up to the number of ranks."""


class ReduceOnly(TwoPhase):
    """Every rank ends with its shard of the sum, and tells nobody: all other gradients stay each rank's own."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self.reduce = link.expect(tag, self.for_sum)

    def _gather(self, link: Link, meter: Meter) -> None:
        pass


class GatherOnly(TwoPhase):
    """Every rank's own shard stands for the sum, and all ranks get all shards."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self.gather = link.expect(tag + 1, self.sums)

    def _reduce(self, link: Link, meter: Meter, ready: Mark) -> None:
        self.total.copy_(self.parts[self.rank])


class ComputeOnly(TwoPhase):
    """Neither phase."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        pass


KEPT: dict[str, type[TwoPhase]] = {
    "reduce-only": ReduceOnly,
    "gather-only": GatherOnly,
    "compute-only": ComputeOnly,
}


def keep_only(part: str, exchange: Exchange) -> None:
    """From the next step on these buckets do only this part of their exchange. On all ranks, between steps.

    Raises StepStateError for a bucket without two phases, naming it.
    """
    for buffers in exchange.buckets:
        for chunk in buffers.chunks:
            if not isinstance(chunk, TwoPhase):
                raise StepStateError(
                    f"bucket {buffers.index} runs {', '.join(buffers.bucket.option)}: only an exchange in two phases, alltoall "
                    f"and allgather, can run {part}. Give the policy the scheme alltoall."
                )
            chunk.__class__ = KEPT[part]


def exchange_alone(exchange: Exchange, number: int) -> None:
    """Exchange all buckets beside nothing else, and wait for it. On all ranks, between steps.

    Exchange `number` of a row, from 0, sends what the one before has left in the buckets, or new random numbers.
    """
    if number % SUMS_IN_A_ROW == 0:
        generator = torch.Generator().manual_seed(number)
        for buffers in exchange.buckets:
            buffers.flat.normal_(generator=generator)
    exchange.executor.start()
    for bucket in range(len(exchange.buckets)):
        exchange.executor.ready(bucket)
    exchange.executor.finish()
