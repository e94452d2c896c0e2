"""What a rank does to tensors between exchanges, made once and run in every step; and schemes made of such exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gradwire.collectives.link import AllToAll, Link
from gradwire.collectives.memory import Memory
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Codec
from gradwire.collectives.streams import Mark, Streams

__all__ = ["Add", "Copy", "Decode", "Encoding", "Transfer", "Transfers", "Work", "joined", "payload_buffers"]

ALIGNMENT = 16
"""Bytes at whose multiples payloads that travel together begin: kernels load words, not bytes."""


class Work(Protocol):
    """One piece of work on tensors that stay the same."""

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        """Do it, or queue it on the stream, which is the current one of these."""
        ...


@dataclass(frozen=True)
class Copy:
    """Same values, in the dtype of `into`."""

    into: torch.Tensor
    source: torch.Tensor

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        self.into.copy_(self.source)


@dataclass(frozen=True)
class Add:
    """One more term of a sum."""

    into: torch.Tensor
    source: torch.Tensor

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        self.into.add_(self.source)


@dataclass(frozen=True)
class Encoding:
    """One payload."""

    codec: Codec
    source: torch.Tensor
    memory: Memory
    segments: Any
    context: Any
    payload: torch.Tensor

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        with self.memory.open(streams, self.source) as state:
            self.codec.encode(self.source, state, self.segments, self.context.on(stream), self.payload)


@dataclass(frozen=True)
class Decode:
    """What a payload holds, written or added."""

    codec: Codec
    payload: torch.Tensor
    segments: Any
    dtype: torch.dtype
    """Of the values that were encoded."""
    add: bool
    into: torch.Tensor
    context: Any

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        self.codec.decode(self.payload, self.segments, self.dtype, self.add, self.into, self.context.on(stream))


@dataclass
class Transfer:
    """One exchange with the work around it."""

    before: list[Work]
    """Done before anything is sent."""
    sent: list[torch.Tensor]
    """To each rank."""
    received: list[torch.Tensor]
    """From each rank."""
    arrivals: dict[int, list[Work]] = field(default_factory=dict)
    """What is done when a rank's part is there, in the order in which they are waited for."""
    after: list[Work] = field(default_factory=list)
    """Done when everything is."""


class Transfers:
    """A scheme that is a list of transfers for each phase, one after another."""

    def __init__(self, phases: list[list[Transfer]], rank: int, world_size: int) -> None:
        self.phases, self.rank = phases, rank
        self.shared: dict[str, torch.Tensor] = {}
        every = [transfer for phase in phases for transfer in phase]
        self.exchanges = len(every)
        self.bytes_to = [
            sum(each.sent[to].numel() * each.sent[to].element_size() for each in every if to != rank)
            for to in range(world_size)
        ]
        self._done: Mark = None
        self._posted: list[list[AllToAll]] = []

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self._posted = []
        for phase in self.phases:
            self._posted.append([link.expect(tag + number, each.received) for number, each in enumerate(phase)])
            tag += len(phase)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        done = ready if phase == 0 else self._done
        for transfer, exchange in zip(self.phases[phase], self._posted[phase], strict=True):
            with link.streams.encoding(done) as stream:
                with meter.codec():
                    for work in transfer.before:
                        work.run(link.streams, stream)
                exchange.send(transfer.sent)
            with link.streams.decoding() as stream:
                for source, works in transfer.arrivals.items():
                    exchange.wait(source)
                    with meter.codec():
                        for work in works:
                            work.run(link.streams, stream)
                exchange.finish()
                with meter.codec():
                    for work in transfer.after:
                        work.run(link.streams, stream)
                done = self._done = link.streams.mark()


def payload_buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Payloads of these sizes, uint8, one after another in one piece of memory."""
    starts, end = _places(sizes)
    # zeros, since the gaps travel too
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def joined(payloads: Sequence[torch.Tensor], nothing: torch.Tensor) -> tuple[torch.Tensor, list[Work]]:
    """One tensor of several payloads, as `payload_buffers` places them; and the copies that it takes, if they lie otherwise."""
    if not payloads:
        return nothing, []
    first = payloads[0]
    starts, end = _places([payload.numel() for payload in payloads])
    at = [payload.storage_offset() - first.storage_offset() for payload in payloads]
    if at == starts and len({payload.untyped_storage().data_ptr() for payload in payloads}) == 1:
        return first.as_strided((end,), (1,), first.storage_offset()), []
    together = payload_buffers([payload.numel() for payload in payloads], first.device)
    copies: list[Work] = [Copy(into, source) for into, source in zip(together, payloads, strict=True)]
    return together[0].as_strided((end,), (1,), 0), copies


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where payloads of these sizes begin, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + size
    return starts, end
