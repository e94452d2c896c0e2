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

__all__ = [
    "AllGather",
    "AllReduce",
    "Codec",
    "Kept",
    "Memory",
    "OneEncode",
    "Piece",
    "Program",
    "Runs",
    "Scheme",
    "SummedCodec",
    "Summing",
    "TwoPhase",
    "around_ring",
    "kept_for",
]

Memory = dict[str, torch.Tensor]
"""What one encode remembers between steps: name, as 'residual', to a tensor with a number for each element encoded."""


@dataclass(frozen=True)
class Kept:
    """What one encode remembers, and of which elements."""

    name: str
    """The number of the encode; 'left' is what goes into the next gradient before any encode."""
    start: int
    """The first element of the piece that it covers."""
    tensors: Memory
    copy: bool = False
    """Whether a lower rank encodes the very same values: what is lost there is lost once."""


class Codec(Protocol):
    """The part of a compressor that schemes use; see gradwire.compressors.base."""

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def encodes_own_part(self) -> bool: ...

    def for_sum(self) -> "Codec": ...

    def payload_bytes(self, segments: Any, dtype: torch.dtype) -> int: ...

    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> None: ...

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None: ...


class Program(Protocol):
    """One piece's work with a codec whose payloads are summed on the wire, in rounds; see gradwire.compressors.base."""

    payloads: list[torch.Tensor]
    """Of each round, float32: what is summed."""
    shared: Memory
    """What is remembered and the same on all ranks, by tensor name."""

    def fill(self, round_number: int, context: Any) -> None:
        """Write the round's payload."""
        ...

    def finish(self, context: Any) -> None:
        """Write the sum of gradients to the flat buffer."""
        ...


class SummedCodec(Protocol):
    """A codec of such payloads."""

    @property
    def state(self) -> tuple[str, ...]: ...

    def program(self, flat: Any, state: Any, segments: Any) -> Program: ...


class Runs(Protocol):
    """How a piece may be cut."""

    def cut(self, start: int, end: int, parts: int) -> Sequence[int]:
        """parts + 1 edges of elements start..end of the piece, at which the codec allows it to be cut."""
        ...

    def between(self, start: int, end: int) -> Any:
        """Segments of these elements, offsets counted from `start`."""
        ...


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
    contexts: Sequence[Any]
    """One context for each encode of the scheme."""
    runs: Runs


class Scheme(Protocol):
    """What the engine runs: phases by number, each ending in everything that follows its collective."""

    bytes_to: list[int]
    """Bytes this rank sends to each rank in a step. Of a sum on the wire: as if around a ring."""
    exchanges: int
    """Tags that `post` takes."""
    shared: Memory
    """What is remembered and the same on all ranks, by tensor name."""
    aliases: list[torch.Tensor]
    """All tensors kept here whose memory is the bucket's."""

    @property
    def memory(self) -> Sequence[Kept]:
        """What each encode remembers."""
        ...

    @property
    def remembers(self) -> tuple[str, ...]:
        """What encodes remember, by name, also on ranks that encode nothing."""
        ...

    def post(self, link: Link, tag: int) -> None:
        """At the start of a step: announce the exchanges, with tags from `tag` up."""
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
        """Begin with what another scheme of this rank remembered of the elements from `start` on. Memory was zero."""
        ...


class OneEncode:
    """Of schemes in which every rank encodes every element once: what it remembers, and takes back."""

    memory: list[Kept]
    piece: Piece
    rank: int

    @property
    def remembers(self) -> tuple[str, ...]:
        return tuple(self.memory[0].tensors)

    def take_back(self, start: int, end: int) -> None:
        if "residual" in self.remembers and self.rank == 0:
            self.memory[0].tensors["residual"][start:end] += self.piece.flat[start:end]

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        self.memory[0].tensors[what][start : start + values.numel()] = values


class AllReduce:
    """Summed on the wire by the backend, in the tensor's dtype; nothing is encoded."""

    exchanges = 0

    def __init__(self, flat: torch.Tensor, rank: int, world_size: int) -> None:
        self.flat = flat
        self.memory: list[Kept] = []
        self.remembers: tuple[str, ...] = ()
        self.shared: Memory = {}
        self.aliases = [flat]
        self.bytes_to = around_ring(flat.numel() * flat.element_size(), rank, world_size)

    def post(self, link: Link, tag: int) -> None:
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

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece, self.rank = codec, piece, rank
        self.sent, *arrivals = _payloads(piece, [codec.payload_bytes(piece.whole, piece.flat.dtype)] * world_size)
        self.payloads = [*arrivals[:rank], self.sent, *arrivals[rank:]]
        wide = piece.flat.dtype != piece.reduce_dtype
        self.total = torch.empty_like(piece.flat, dtype=piece.reduce_dtype) if wide else piece.flat
        self.memory = [Kept("0", 0, kept_for(codec, piece.flat))]
        self.shared: Memory = {}
        self.state = list(self.memory[0].tensors.values())
        self.aliases = [piece.flat]
        self.bytes_to = [0 if to == rank else self.sent.numel() for to in range(world_size)]

    def post(self, link: Link, tag: int) -> None:
        self.exchange = link.expect(tag, self.payloads)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        flat, piece, context = self.piece.flat, self.piece, self.piece.contexts[0]
        with link.streams.encoding(ready) as stream:
            with meter.codec():
                self.codec.encode(flat, self.state, piece.whole, context.on(stream), self.sent)
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
    owner encodes the sum again and all ranks, the owner too, use what that decodes to (CGX's SRA; notes D2, D3, D34).
    """

    exchanges = 2

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece, self.rank, self.world_size = codec, piece, rank, world_size
        self.again = codec.for_sum()
        bounds = piece.bounds
        self.parts = [piece.flat[bounds[j] : bounds[j + 1]] for j in range(world_size)]
        sizes = [codec.payload_bytes(segments, piece.flat.dtype) for segments in piece.shards]
        self.total = torch.empty_like(self.parts[rank], dtype=piece.reduce_dtype)
        sum_sizes = [self.again.payload_bytes(segments, self.total.dtype) for segments in piece.shards]
        # to everybody another shard; from everybody the own shard; then the sums, of everybody's shard
        self.to_owners = _payloads(piece, [0 if j == rank else sizes[j] for j in range(world_size)])
        self.own_part = _payloads(piece, [sizes[rank] if codec.encodes_own_part else 0])[0]
        self.for_sum = _payloads(piece, [0 if j == rank else sizes[rank] for j in range(world_size)])
        self.sums = _payloads(piece, sum_sizes)
        self.own, self.of_sum = kept_for(codec, piece.flat), kept_for(self.again, self.total)
        self.memory = [Kept("0", 0, self.own), Kept("1", bounds[rank], self.of_sum)]
        self.remembers = tuple(self.own)
        self.shared: Memory = {}
        self.states = [[m[bounds[j] : bounds[j + 1]] for m in self.own.values()] for j in range(world_size)]
        self.sum_state = list(self.of_sum.values())
        self.aliases = [piece.flat, *self.parts]
        self.bytes_to = [0 if to == rank else sizes[to] + sum_sizes[rank] for to in range(world_size)]
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
                        codec.encode(part, self.states[j], piece.shards[j], context.on(stream), self.to_owners[j])
            self.reduce.send(self.to_owners)
        with link.streams.decoding() as stream:
            for source in range(self.world_size):
                self.reduce.wait(source)
                with meter.codec():
                    if source != self.rank or codec.encodes_own_part:
                        if source == self.rank:
                            codec.encode(mine, self.states[source], segments, context.on(stream), self.own_part)
                        payload = self.own_part if source == self.rank else self.for_sum[source]
                        codec.decode(payload, segments, dtype, source > 0, self.total, context.on(stream))
                    elif source:
                        self.total.add_(mine)
                    else:
                        self.total.copy_(mine)
            self.reduce.finish()
            self.summed = link.streams.mark()

    def _gather(self, link: Link, meter: Meter) -> None:
        piece, codec, context, dtype = self.piece, self.again, self.piece.contexts[1], self.total.dtype
        own = self.sums[self.rank]
        with link.streams.encoding(self.summed) as stream:
            with meter.codec():
                codec.encode(self.total, self.sum_state, piece.shards[self.rank], context.on(stream), own)
            self.gather.send([own] * self.world_size)
        with link.streams.decoding() as stream:
            for j, part in enumerate(self.parts):
                self.gather.wait(j)
                with meter.codec():
                    codec.decode(self.sums[j], piece.shards[j], dtype, False, part, context.on(stream))
            self.gather.finish()

    def take_back(self, start: int, end: int) -> None:
        low, high = self._of_shard(start, end)
        if "residual" in self.of_sum and low < high:
            own = self.piece.bounds[self.rank]
            self.of_sum["residual"][low - own : high - own] += self.piece.flat[low:high]

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        self.own[what][start : start + values.numel()] = values
        low, high = self._of_shard(start, start + values.numel())
        if what in self.of_sum and low < high:  # of the own shard the second encode takes it: the first has none
            own = self.piece.bounds[self.rank]
            self.of_sum[what][low - own : high - own] = values[low - start : high - start]
            self.own[what][low:high] = 0.0

    def _of_shard(self, start: int, end: int) -> tuple[int, int]:
        return max(start, self.piece.bounds[self.rank]), min(end, self.piece.bounds[self.rank + 1])


class Summing(OneEncode):
    """Payloads are summed on the wire by the backend, round after round; each is computed from the sum before it."""

    exchanges = 0

    def __init__(self, codec: SummedCodec, piece: Piece, rank: int, world_size: int) -> None:
        self.piece, self.rank = piece, rank
        self.memory = [Kept("0", 0, kept_for(codec, piece.flat))]
        self.program = codec.program(piece.flat, list(self.memory[0].tensors.values()), piece.whole)
        self.shared = self.program.shared
        self.aliases = [piece.flat]
        numel = sum(payload.numel() for payload in self.program.payloads)
        self.bytes_to = around_ring(4 * numel, rank, world_size)
        self.summed: Mark = None

    def post(self, link: Link, tag: int) -> None:
        pass

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        payload, context = self.program.payloads[phase], self.piece.contexts[0]
        with link.streams.encoding(ready if phase == 0 else self.summed) as stream:
            with meter.codec():
                self.program.fill(phase, context.on(stream))
            with transfer():
                work = link.all_reduce(payload)
        with link.streams.decoding() as stream:
            with transfer():
                work.wait()
            self.summed = link.streams.mark()
            if phase == len(self.program.payloads) - 1:
                with meter.codec():
                    self.program.finish(context.on(stream))


def around_ring(nbytes: int, rank: int, world_size: int) -> list[int]:
    """What a rank sends to each when so many bytes are summed around a ring."""
    sent = round(2 * (world_size - 1) / world_size * nbytes)
    return [sent if to == (rank + 1) % world_size else 0 for to in range(world_size)]


def kept_for(codec: Codec | SummedCodec, like: torch.Tensor) -> Memory:
    """Zeros for what the codec remembers of these elements."""
    return {name: torch.zeros_like(like, dtype=torch.float32) for name in codec.state}


def _payloads(piece: Piece, sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=piece.flat.device) for size in sizes]
