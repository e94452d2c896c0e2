"""Schemes: how a piece of a bucket is synchronised. Each is a list of phases that the engine runs in launch order.

A scheme is made once for a piece (a chunk of a bucket) with all its buffers, and then only runs. It knows a compressor
by its two functions and nothing of plans. Every rank ends with the same bits: what is summed is summed in rank order,
and what is used is what was decoded from bytes that all ranks have. `gradwire.core.collectives` says which class runs what.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from gradwire.collectives.link import AllToAll, Group, Link, transfer
from gradwire.collectives.memory import Memory
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Codec, Piece, SummedCodec
from gradwire.collectives.streams import Mark, Streams

__all__ = ["AllGather", "AllReduce", "OneEncode", "Scheme", "Summing", "TwoPhase", "around_ring"]


class Scheme(Protocol):
    """What the engine runs: phases by number, each ending in everything that follows its collective."""

    bytes_to: list[int]
    """Bytes this rank sends to each rank in a step. Of a sum on the wire: as if around a ring."""
    exchanges: int
    """Tags that `post` takes."""
    shared: dict[str, torch.Tensor]
    """What is remembered and the same on all ranks, by tensor name."""
    aliases: list[torch.Tensor]
    """All tensors kept here whose memory is the bucket's."""

    @property
    def memory(self) -> Sequence[Memory]:
        """What each encode remembers, in the parts that are encoded at once."""
        ...

    @property
    def remembers(self) -> tuple[str, ...]:
        """What encodes remember, by name, also on ranks that encode nothing."""
        ...

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        """At the start of a step: announce the exchanges of these phases, with tags from `tag` up. All phases, but for a step of
        the reduce or the gather phase alone, which only flat schemes of two phases run."""
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

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        """Go on with what another scheme of this rank remembered of the elements from `start` on. Memory was zero."""
        ...


class OneEncode:
    """Of schemes in which every rank encodes every element once: what it remembers, and takes back."""

    memory: list[Memory]
    piece: Piece
    rank: int

    @property
    def remembers(self) -> tuple[str, ...]:
        return self.memory[0].names

    def take_back(self, start: int, end: int) -> None:
        if self.rank == 0:
            self.take_over("residual", start, self.piece.flat[start:end])

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        for memory in self.memory:
            memory.add(what, start, values)


class AllReduce:
    """Summed on the wire by the backend, in the tensor's dtype; nothing is encoded."""

    exchanges = 0

    def __init__(self, flat: torch.Tensor, rank: int, world_size: int) -> None:
        self.flat = flat
        self.memory: list[Memory] = []
        self.remembers: tuple[str, ...] = ()
        self.shared: dict[str, torch.Tensor] = {}
        self.aliases = [flat]
        self.bytes_to = around_ring(flat.numel() * flat.element_size(), rank, world_size)

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        with link.streams.encoding(ready), transfer():
            work = link.all_reduce(self.flat)
        with link.streams.decoding(), transfer():
            work.wait()

    def take_back(self, start: int, end: int) -> None:
        pass

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        pass


class AllGather(OneEncode):
    """Each rank encodes once and gets everybody's payload: one encode's error, world_size - 1 payloads sent."""

    exchanges = 1

    def __init__(self, codec: Codec, piece: Piece, group: Group, root: int = 0) -> None:
        rank, world_size = group.rank, group.world_size
        self.codec, self.piece, self.rank = codec, piece, rank
        self.sent, *arrivals = _payloads(piece, [codec.payload_bytes(piece.whole, piece.flat.dtype)] * world_size)
        self.payloads = [*arrivals[:rank], self.sent, *arrivals[rank:]]
        wide = piece.flat.dtype != piece.reduce_dtype
        self.total = torch.empty_like(piece.flat, dtype=piece.reduce_dtype) if wide else piece.flat
        self.own = piece.memory(codec, 0, 0, piece.flat.numel(), piece.whole)
        self.memory = [self.own]
        self.shared: dict[str, torch.Tensor] = {}
        self.aliases = [piece.flat]
        self.bytes_to = [0 if to == rank else self.sent.numel() for to in range(world_size)]

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self.exchange = link.expect(tag, self.payloads)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        flat, piece, context = self.piece.flat, self.piece, self.piece.contexts[0]
        with link.streams.encoding(ready) as stream:
            with meter.codec(), self.own.open(link.streams, flat) as state:
                self.codec.encode(flat, state, piece.whole, context.on(stream), self.sent)
            self.exchange.send([self.sent] * len(self.payloads))
        with link.streams.decoding() as stream:
            for source, payload in enumerate(self.payloads):
                self.exchange.wait(source)
                with meter.codec():
                    self.codec.decode(payload, piece.whole, flat.dtype, source > 0, self.total, context.on(stream))
            if self.total is not flat:
                flat.copy_(self.total)
            self.exchange.finish()


class TwoPhase:
    """Reduce: shard j of everybody goes encoded to rank j, which adds in rank order, its own part as it is. Gather: the
    owner encodes the sum again and all ranks, the owner too, use what that decodes to (CGX's SRA; docs/papers/cgx.md).
    """

    exchanges = 2

    def __init__(self, codec: Codec, piece: Piece, group: Group, root: int = 0) -> None:
        rank, world_size = group.rank, group.world_size
        self.codec, self.piece, self.rank, self.world_size = codec, piece, rank, world_size
        self.again = codec.for_sum()
        bounds = piece.bounds
        self.parts = [piece.flat[bounds[j] : bounds[j + 1]] for j in range(world_size)]
        sizes = [codec.payload_bytes(segments, piece.flat.dtype) for segments in piece.shards]
        mine = self.parts[rank]
        # a sum of two does not depend on their order: where the own part is one of the first two, others are added to it
        self.in_place = rank < 2 and not codec.encodes_own_part and mine.dtype == piece.reduce_dtype
        self.total = mine if self.in_place else torch.empty_like(mine, dtype=piece.reduce_dtype)
        sum_sizes = [self.again.payload_bytes(segments, self.total.dtype) for segments in piece.shards]
        # to everybody another shard; from everybody the own shard; then the sums, of everybody's shard
        self.to_owners = _payloads(piece, [0 if j == rank else sizes[j] for j in range(world_size)])
        self.own_part = _payloads(piece, [sizes[rank] if codec.encodes_own_part else 0])[0]
        self.for_sum = _payloads(piece, [0 if j == rank else sizes[rank] for j in range(world_size)])
        self.sums = _payloads(piece, sum_sizes)
        edges = zip(pairwise(bounds), piece.shards, strict=True)
        self.own = [piece.memory(codec, 0, start, end, segments) for (start, end), segments in edges]
        self.of_sum = piece.memory(self.again, 1, bounds[rank], bounds[rank + 1], piece.shards[rank])
        self.memory = [*self.own, self.of_sum]
        self.remembers = codec.state
        self.shared: dict[str, torch.Tensor] = {}
        self.aliases = [piece.flat, *self.parts]
        self.bytes_to = [0 if to == rank else sizes[to] + sum_sizes[rank] for to in range(world_size)]
        self.summed: Mark = None
        self.start = bounds[rank]
        """The first element of the own shard, from the piece's start."""

    def take_shard(self, streams: Streams) -> None:
        """Before a gather phase alone: the own shard of the flat buffer is what is gathered."""
        if not self.in_place:
            self.total.copy_(self.parts[self.rank])
        self.summed = streams.mark()

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        if 0 in phases:
            self.reduce: AllToAll = link.expect(tag, self.for_sum)
        if 1 in phases:
            self.gather: AllToAll = link.expect(tag + 1, self.sums)

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
                        with self.own[j].open(link.streams, part) as state:
                            codec.encode(part, state, piece.shards[j], context.on(stream), self.to_owners[j])
            self.reduce.send(self.to_owners)
        with link.streams.decoding() as stream:
            for source in range(self.world_size):
                self.reduce.wait(source)
                with meter.codec():
                    if source != self.rank or codec.encodes_own_part:
                        if source == self.rank:
                            with self.own[source].open(link.streams, mine) as state:
                                codec.encode(mine, state, segments, context.on(stream), self.own_part)
                        payload = self.own_part if source == self.rank else self.for_sum[source]
                        add = source > 0 or self.in_place
                        codec.decode(payload, segments, dtype, add, self.total, context.on(stream))
                    elif source and not self.in_place:
                        self.total.add_(mine)
                    elif not self.in_place:
                        self.total.copy_(mine)
            self.reduce.finish()
            self.summed = link.streams.mark()

    def _gather(self, link: Link, meter: Meter) -> None:
        piece, codec, context, dtype = self.piece, self.again, self.piece.contexts[1], self.total.dtype
        own = self.sums[self.rank]
        with link.streams.encoding(self.summed) as stream:
            with meter.codec(), self.of_sum.open(link.streams, self.total) as state:
                codec.encode(self.total, state, piece.shards[self.rank], context.on(stream), own)
            self.gather.send([own] * self.world_size)
        with link.streams.decoding() as stream:
            for j, part in enumerate(self.parts):
                self.gather.wait(j)
                with meter.codec():
                    codec.decode(self.sums[j], piece.shards[j], dtype, False, part, context.on(stream))
            self.gather.finish()

    def take_back(self, start: int, end: int) -> None:
        self.of_sum.add("residual", start, self.piece.flat[start:end])

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        for owner, own in enumerate(self.own):
            # of the own shard the second encode takes it: the first has none
            memory = self.of_sum if owner == self.rank and what in self.of_sum.names else own
            memory.add(what, start, values)


class Summing(OneEncode):
    """Payloads are summed on the wire by the backend, round after round; each is computed from the sum before it."""

    exchanges = 0

    def __init__(self, codec: SummedCodec, piece: Piece, group: Group, root: int = 0) -> None:
        self.piece, self.rank = piece, group.rank
        self.own = piece.memory(codec, 0, 0, piece.flat.numel(), piece.whole)
        self.memory = [self.own]
        self.program = codec.program(piece.flat, self.own.state, piece.whole)
        self.shared = self.program.shared
        self.aliases = [piece.flat]
        numel = sum(payload.numel() for payload in self.program.payloads)
        self.bytes_to = around_ring(4 * numel, group.rank, group.world_size)
        self.summed: Mark = None

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        payload, context = self.program.payloads[phase], self.piece.contexts[0]
        last = phase == len(self.program.payloads) - 1
        with link.streams.encoding(ready if phase == 0 else self.summed) as stream:
            with meter.codec():
                self.own.take(link.streams)
                self.program.fill(phase, context.on(stream))
                if not last:
                    self.own.leave(link.streams)
            with transfer():
                work = link.all_reduce(payload)
        with link.streams.decoding() as stream:
            with transfer():
                work.wait()
            self.summed = link.streams.mark()
            if last:
                with meter.codec():
                    self.program.finish(context.on(stream))
                    self.own.keep(link.streams, self.piece.flat)


def around_ring(nbytes: int, rank: int, world_size: int) -> list[int]:
    """What a rank sends to each when so many bytes are summed around a ring."""
    sent = round(2 * (world_size - 1) / world_size * nbytes)
    return [sent if to == (rank + 1) % world_size else 0 for to in range(world_size)]


def _payloads(piece: Piece, sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=piece.flat.device) for size in sizes]
