"""Schemes: how a piece of a bucket is synchronised. Each is a list of phases that the engine runs in launch order.

A scheme is made once for a piece (a chunk of a bucket) with all its buffers, and then only runs. It knows a compressor
by its two functions and nothing of plans. Every rank ends with the same bits: what is summed is summed in rank order,
and what is used is what was decoded from bytes that all ranks have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradwire.collectives.link import Exchange, Link, transfer
from gradwire.collectives.meter import Meter
from gradwire.collectives.streams import Mark

__all__ = ["AllGather", "AllReduce", "Codec", "Piece", "Scheme", "TwoPhase"]


class Codec(Protocol):
    """The part of a compressor that schemes use; see gradwire.compressors.base."""

    feeds_back: bool

    def payload_bytes(self, segments: Any, dtype: torch.dtype) -> int: ...

    def encode(self, src: Any, residual: Any, segments: Any, context: Any, payload: Any) -> None: ...

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None: ...


@dataclass(frozen=True)
class Piece:
    """A run of a bucket's flat buffer, cut into one shard per rank."""

    flat: torch.Tensor
    """The run itself: every rank's gradient before, the sum after."""
    bounds: tuple[int, ...]
    """world_size + 1 elements: shard j is flat[bounds[j]:bounds[j + 1]]."""
    shards: Sequence[Any]
    """Segments of each shard, offsets counted from the shard's start."""
    whole: Any
    """Segments of the run."""
    reduce_dtype: torch.dtype
    residual_dtype: torch.dtype
    contexts: Sequence[Any]
    """One context for each encode of the scheme."""


class Scheme(Protocol):
    """What the engine runs: phases by number, each ending in everything that follows its collective."""

    wire_bytes: int
    """Bytes this rank sends."""
    residuals: list[torch.Tensor]
    """One per encode, when the codec feeds back."""

    def post(self, link: Link, tag: int) -> None:
        """At the start of a step: announce the exchanges, with tags from `tag` up, one for each phase."""
        ...

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        """Do one phase. `ready` marks the moment from which the flat buffer holds the gradient.

        Raises LinkError where a transfer failed.
        """
        ...

    def take_back(self, start: int, end: int) -> None:
        """The sum in these elements of the run is not used: where there are residuals it is sent again in the next step.
        Every rank calls it; one of them keeps the sum."""
        ...


class AllReduce:
    """Summed on the wire by the backend, in the tensor's dtype; nothing is encoded."""

    def __init__(self, flat: torch.Tensor, world_size: int) -> None:
        self.flat = flat
        self.residuals: list[torch.Tensor] = []
        self.wire_bytes = round(2 * (world_size - 1) / world_size * flat.numel() * flat.element_size())

    def post(self, link: Link, tag: int) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        with link.streams.encoding(ready), transfer():
            work = link.all_reduce(self.flat)
        with link.streams.decoding(), transfer():
            work.wait()

    def take_back(self, start: int, end: int) -> None:
        pass


class AllGather:
    """Each rank encodes once and gets everybody's payload: one encode's error, world_size - 1 payloads sent."""

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece, self.rank = codec, piece, rank
        self.sent, *arrivals = _payloads(piece, [codec.payload_bytes(piece.whole, piece.flat.dtype)] * world_size)
        self.payloads = [*arrivals[:rank], self.sent, *arrivals[rank:]]
        wide = piece.flat.dtype != piece.reduce_dtype
        self.total = torch.empty_like(piece.flat, dtype=piece.reduce_dtype) if wide else piece.flat
        self.residuals = [_residual(piece.flat, piece)] if codec.feeds_back else []
        self.wire_bytes = (world_size - 1) * self.sent.numel()

    def post(self, link: Link, tag: int) -> None:
        self.exchange = link.expect(tag, self.payloads)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        flat, piece, context = self.piece.flat, self.piece, self.piece.contexts[0]
        residual = self.residuals[0] if self.residuals else None
        with link.streams.encoding(ready) as stream:
            with meter.codec():
                self.codec.encode(flat, residual, piece.whole, context.on(stream), self.sent)
            self.exchange.send([self.sent] * len(self.payloads))
        with link.streams.decoding() as stream:
            for source, payload in enumerate(self.payloads):
                self.exchange.wait(source)
                with meter.codec():
                    self.codec.decode(payload, piece.whole, flat.dtype, source > 0, self.total, context.on(stream))
            if self.total is not flat:
                flat.copy_(self.total)
            self.exchange.finish()

    def take_back(self, start: int, end: int) -> None:
        if self.residuals and self.rank == 0:
            self.residuals[0][start:end] += self.piece.flat[start:end]


class TwoPhase:
    """Reduce: shard j of everybody goes encoded to rank j, which adds in rank order, its own part as it is. Gather: the
    owner encodes the sum again and all ranks, the owner too, use what that decodes to (CGX's SRA; notes D2, D3, D34).
    """

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece, self.rank, self.world_size = codec, piece, rank, world_size
        bounds = piece.bounds
        self.parts = [piece.flat[bounds[j] : bounds[j + 1]] for j in range(world_size)]
        sizes = [codec.payload_bytes(segments, piece.flat.dtype) for segments in piece.shards]
        self.total = torch.empty_like(self.parts[rank], dtype=piece.reduce_dtype)
        sum_sizes = [codec.payload_bytes(segments, self.total.dtype) for segments in piece.shards]
        # to everybody another shard; from everybody the own shard; then the sums, of everybody's shard
        self.to_owners = _payloads(piece, [0 if j == rank else sizes[j] for j in range(world_size)])
        self.for_sum = _payloads(piece, [0 if j == rank else sizes[rank] for j in range(world_size)])
        self.sums = _payloads(piece, sum_sizes)
        self.residuals = [_residual(piece.flat, piece), _residual(self.total, piece)] if codec.feeds_back else []
        self.sent_residuals: list[torch.Tensor | None] = [None] * world_size
        if self.residuals:
            self.sent_residuals = [self.residuals[0][bounds[j] : bounds[j + 1]] for j in range(world_size)]
        self.wire_bytes = sum(sizes) - sizes[rank] + (world_size - 1) * sum_sizes[rank]
        self.summed: Mark = None

    def post(self, link: Link, tag: int) -> None:
        self.reduce: Exchange = link.expect(tag, self.for_sum)
        self.gather: Exchange = link.expect(tag + 1, self.sums)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0:
            self._reduce(link, meter, ready)
        else:
            self._gather(link, meter)

    def _reduce(self, link: Link, meter: Meter, ready: Mark) -> None:
        piece, codec, context = self.piece, self.codec, self.piece.contexts[0]
        mine, segments, dtype = self.parts[self.rank], piece.shards[self.rank], piece.flat.dtype
        with link.streams.encoding(ready) as stream:
            with meter.codec():
                for j, part in enumerate(self.parts):
                    if j != self.rank:
                        residual, payload = self.sent_residuals[j], self.to_owners[j]
                        codec.encode(part, residual, piece.shards[j], context.on(stream), payload)
            self.reduce.send(self.to_owners)
        with link.streams.decoding() as stream:
            for source in range(self.world_size):
                self.reduce.wait(source)
                with meter.codec():
                    if source != self.rank:
                        payload = self.for_sum[source]
                        codec.decode(payload, segments, dtype, source > 0, self.total, context.on(stream))
                    elif source:
                        self.total.add_(mine)
                    else:
                        self.total.copy_(mine)
            self.reduce.finish()
            self.summed = link.streams.mark()

    def _gather(self, link: Link, meter: Meter) -> None:
        piece, codec, context, dtype = self.piece, self.codec, self.piece.contexts[1], self.total.dtype
        own = self.sums[self.rank]
        residual = self.residuals[1] if self.residuals else None
        with link.streams.encoding(self.summed) as stream:
            with meter.codec():
                codec.encode(self.total, residual, piece.shards[self.rank], context.on(stream), own)
            self.gather.send([own] * self.world_size)
        with link.streams.decoding() as stream:
            for j, part in enumerate(self.parts):
                self.gather.wait(j)
                with meter.codec():
                    codec.decode(self.sums[j], piece.shards[j], dtype, False, part, context.on(stream))
            self.gather.finish()

    def take_back(self, start: int, end: int) -> None:
        own, stop = self.piece.bounds[self.rank], self.piece.bounds[self.rank + 1]
        low, high = max(start, own), min(end, stop)
        if self.residuals and low < high:
            self.residuals[1][low - own : high - own] += self.piece.flat[low:high]


def _residual(like: torch.Tensor, piece: Piece) -> torch.Tensor:
    return torch.zeros_like(like, dtype=piece.residual_dtype)


def _payloads(piece: Piece, sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=piece.flat.device) for size in sizes]
