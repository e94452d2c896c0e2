"""Schemes: the ways to synchronise a piece of a bucket. A scheme is a list of phases, which the engine runs in launch order.

A scheme allocates all its buffers once, for one piece; each step only runs it. Every rank ends with the same bits: sums are
taken in rank order, and all ranks decode the same bytes. `gradwire.core.collectives` says which class runs which collective.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch

from gradwire.collectives.codec_state import JointMemory, Memory
from gradwire.collectives.ops import (
    ALIGNMENT,
    Add,
    Copy,
    Decode,
    DecodeSum,
    Encoding,
    Gather,
    Scale,
    Transfer,
    Transfers,
    Work,
    batch_of,
    in_batches,
    in_c,
    payload_buffers,
    weighted,
    whole_of,
)
from gradwire.collectives.piece import Piece
from gradwire.collectives.wire_sum import WireSum, can_sum, even_bounds, sums_in_c
from gradwire.kernels import Compressor, Scattered
from gradwire.transport import Grid, Group, Link, Mark, Meter, Streams, transfer


class Scheme(Protocol):
    """The interface that the engine runs. A phase is one collective with the work that follows it."""

    bytes_to: list[int]
    """Bytes that this rank sends to each rank in a step. An all-reduce counts as one around a ring."""
    exchanges: int
    """The number of tags that `post` uses."""
    shared: dict[str, torch.Tensor]
    """State that is the same on all ranks, by tensor name."""
    aliases: list[torch.Tensor]
    """All tensors of this scheme that share the bucket's memory."""

    @property
    def memory(self) -> Sequence[Memory]:
        """The memory of each encode."""

    @property
    def of_gradient(self) -> Sequence[Memory]:
        """The memory of each encode of this rank's own gradient alone, as far as the scheme names them."""

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of what encodes remember, the same on ranks that encode nothing."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        """Announce the exchanges of these phases at the start of a step, with tags from `tag` up."""

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        """Run one phase. From the mark `ready` on the flat buffer holds the gradient. Raises LinkError if a transfer fails."""

    def take_back(self, start: int, end: int) -> None:
        """Put the unused sum of these elements into a residual, if there is one, so that the next step sends the sum again.
        Every rank calls this; one of them keeps the sum."""

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        """Add what another scheme of this rank remembered of the elements from `start` on. The memory is zero before."""


class OneEncode:
    """A scheme in which every rank encodes every element once, or nothing: what it remembers and takes back."""

    memory: list[Memory]
    of_gradient: Sequence[Memory] = ()
    piece: Piece
    rank: int

    @property
    def remembers(self) -> tuple[str, ...]:
        return self.memory[0].names if self.memory else ()

    def take_back(self, start: int, end: int) -> None:
        if self.memory:
            self.piece.forget(start, end)
        if self.memory and self.rank == 0:
            self.take_over("residual", start, self.piece.values(start, end))

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        for memory in self.memory:
            memory.add(what, start, values)


class TensorSum:
    """Sums a tensor over all ranks where it lies, in its own dtype: on the lane's wire by `WireSum`, else by the backend."""

    exchanges = WireSum.exchanges

    def __init__(self, flat: torch.Tensor, grid: Grid) -> None:
        self.flat = flat
        sums = WireSum(flat, grid, even_bounds(flat.numel(), grid.world_size))
        self._on_wire = sums if can_sum(flat) else None
        self._grid, self._staged = grid, dict[int, WireSum]()
        self._staged_for: object = None
        """The generation of the page-locked memory in which the sums of `_staged` are."""
        self.bytes_to = around_ring(flat.nbytes, grid.rank, grid.world_size) if self._on_wire is None else sums.bytes_to

    def run(self, tag: int, link: Link, meter: Meter, ready: Mark) -> None:
        """Sum it. The own term is in it from the mark `ready` on. `tag`: the first of `exchanges`."""
        if self._on_wire is not None and link.wire is not None:
            link.wire.run(self._on_wire.operations((0, 1), tag, link.wire.shared_with), meter)
            return
        if link.pinned is not None and link.wire is not None and sums_in_c(self.flat.dtype):
            with link.streams.encoding(ready):
                meter.begins(link.streams)
                staged = link.pinned.fetch([self.flat])
            if self._staged_for is not link.pinned.generation:
                self._staged, self._staged_for = {}, link.pinned.generation
            copy = staged.parts[0]  # at one of a few places
            if (at := copy.data_ptr()) not in self._staged:
                self._staged[at] = WireSum(copy, self._grid, even_bounds(copy.numel(), self._grid.world_size))
            link.wire.run(self._staged[at].operations((0, 1), tag, link.wire.shared_with), meter)
            with link.streams.decoding():
                link.pinned.put(staged)
            return
        with link.streams.encoding(ready), transfer():
            meter.begins(link.streams)
            work = link.all_reduce(self.flat)
        with link.streams.decoding(), transfer():
            work.wait()


class AllReduce(OneEncode):
    """Sums uncompressed gradients, in their own dtype."""

    exchanges = TensorSum.exchanges

    def __init__(self, flat: torch.Tensor, grid: Grid) -> None:
        self.flat, self.rank, self.aliases = flat, grid.rank, [flat]
        self.memory = []
        self.shared: dict[str, torch.Tensor] = {}
        self._sum = TensorSum(flat, grid)
        self.bytes_to = self._sum.bytes_to
        self._tag = 0

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self._tag = tag

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        self._sum.run(self._tag, link, meter, ready)


class AllGather(Transfers, OneEncode):
    """Each rank encodes once, sends its payload to all ranks, and adds all payloads in rank order."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        rank, world_size, gradient, segments = group.rank, group.world_size, piece.gradient, piece.whole
        dtype = gradient.dtype
        self.piece, self.aliases = piece, [piece.flat]
        self.of_gradient = self.memory = [piece.memory(codec, 0, 0, gradient.numel(), segments)]
        payloads = _payloads(piece, [codec.payload_bytes(segments, dtype)] * world_size)
        wide = dtype != piece.reduce_dtype  # then nothing lies apart
        total = torch.empty_like(piece.flat, dtype=piece.reduce_dtype) if wide else gradient
        context, own = piece.contexts[0], payloads[rank]
        only = Transfer([Encoding(codec, gradient, self.memory[0], segments, context, own)], [own] * world_size, payloads)
        for source, payload in enumerate(payloads):
            only.arrivals[source] = [Decode(codec, payload, segments, dtype, source > 0, total, context)]
        only.after += [Copy(piece.flat, total)] if isinstance(total, torch.Tensor) and wide else []
        super().__init__(weighted([[only]], piece), rank, world_size)
        self.runs_in_c = in_c([codec], piece, self.memory)


class TwoPhase(Transfers):
    """Reduce: each rank sends shard j encoded to rank j, which adds the shards in rank order, its own part unencoded. Gather:
    each owner encodes its sum, and all ranks, the owner too, use the decoded sum (CGX's SRA; docs/papers/cgx.md).
    """

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        rank, world_size = group.rank, group.world_size
        self.rank = rank
        again, bounds, shards, dtype = codec.for_sum(), piece.bounds, piece.shards, piece.flat.dtype
        self.piece = piece
        self.parts = [piece.gradient[start:end] for start, end in pairwise(bounds)]
        mine = self.parts[rank]
        # a sum of two does not depend on their order: if the own part is one of the first two, the others are added to it
        own_first = rank < 2 and not codec.encodes_own_part and (dtype == piece.reduce_dtype or piece.apart is not None)
        self.in_place = own_first and dtype == piece.reduce_dtype
        """Whether the own part becomes the sum where it lies."""
        self.start, self.end = bounds[rank], bounds[rank + 1]
        """The own shard, from the piece's start."""
        self.total = torch.empty(mine.numel(), dtype=piece.reduce_dtype, device=piece.flat.device)
        """The sum of the own shard; empty where it becomes that in gradients that lie apart."""
        total: torch.Tensor | Scattered = self.total
        if self.in_place and isinstance(mine, Scattered):
            self.total, total = piece.flat, replace(mine, factor=1.0)
        elif self.in_place and isinstance(mine, torch.Tensor):
            self.total = total = mine
        edges = zip(pairwise(bounds), shards, strict=True)
        within = None
        if in_batches([codec, again], piece):
            within = JointMemory(codec.state, piece.flat.numel(), piece.flat.device)
        self.own = [
            piece.memory(codec, 0, start, end, segments, within=None if within is None else within.part(start, end))
            for (start, end), segments in edges
        ]
        self.of_sum = piece.memory(again, 1, bounds[rank], bounds[rank + 1], shards[rank])
        self.memory = [*self.own, self.of_sum]
        self.of_gradient = [own for to, own in enumerate(self.own) if to != rank or codec.encodes_own_part]
        self._encodes_own_part = codec.encodes_own_part
        self.remembers = codec.state
        self.aliases = [piece.flat, *(part for part in self.parts if isinstance(part, torch.Tensor))]
        if piece.apart is not None:
            self.aliases = [self.total]  # what may move, though it is of no bucket
        self.total_is_shared = False

        sizes = [codec.payload_bytes(segments, dtype) for segments in shards]
        sizes_to = [0 if to == rank else size for to, size in enumerate(sizes)]
        to_owners = payload_buffers(sizes_to, piece.flat.device) if within is not None else _payloads(piece, sizes_to)
        encoded = [source != rank or codec.encodes_own_part for source in range(world_size)]
        fused = within is not None and not codec.encodes_own_part and sizes[rank] > 0 and codec.adds_payloads(shards[rank])
        stride = -(-sizes[rank] // ALIGNMENT) * ALIGNMENT
        if fused:
            arriving = torch.empty(world_size * stride, dtype=torch.uint8, device=piece.flat.device)
            for_sum = [arriving[at * stride : at * stride + sizes[rank] * each] for at, each in enumerate(encoded)]
        else:
            for_sum = _payloads(piece, [sizes[rank] if each else 0 for each in encoded])
        context = piece.contexts[0]

        def encoding(to: int, payload: torch.Tensor) -> Encoding:
            return Encoding(codec, self.parts[to], self.own[to], shards[to], context, payload)

        others = [(rank + step) % world_size for step in range(1, world_size)]  # not all encode for rank 0 first
        reduce = Transfer([encoding(to, to_owners[to]) for to in others], to_owners, for_sum)
        if within is not None and any(sizes_to):
            batch = batch_of(codec, dtype, shards, bounds, sizes_to)
            reduce.before = [Encoding(codec, piece.flat, within, batch, context, whole_of(to_owners, batch))]
        if own_first and isinstance(mine, Scattered):
            reduce.before.append(Scale(mine, shards[rank]) if self.in_place else self._own_term(add=False))
        for source, payload in enumerate(for_sum):
            works = reduce.arrivals[source] = []
            if encoded[source]:
                works += [encoding(rank, payload)] if source == rank else []
                add = source > 0 or own_first
                works.append(Decode(codec, payload, shards[rank], dtype, add, total, context))
            elif not own_first:
                works.append(self._own_term(add=source > 0))
        if fused and world_size > 1:
            terms = [work for works in reduce.arrivals.values() for work in works]
            own = None if own_first or isinstance(mine, Scattered) else mine  # a part, which moves with the bucket
            reduce.arrivals = {source: [] for source in range(world_size)}
            reduce.after = [DecodeSum(terms, codec, arriving, stride, rank, world_size - 1 - rank, own)]

        sum_sizes = [again.payload_bytes(segments, total.dtype) for segments in shards]
        sums = payload_buffers(sum_sizes, piece.flat.device) if within is not None else _payloads(piece, sum_sizes)
        context = piece.contexts[1]
        encode_sum = Encoding(again, total, self.of_sum, shards[rank], context, sums[rank])
        gather = Transfer([encode_sum], [sums[rank]] * world_size, sums)
        for j, part in enumerate(self.parts):
            gather.arrivals[j] = [Decode(again, sums[j], shards[j], total.dtype, False, part, context)]
        if within is not None and any(sum_sizes):
            batch = batch_of(again, total.dtype, shards, bounds, sum_sizes)
            gather.arrivals = {j: [] for j in range(world_size)}
            gather.after = [Decode(again, whole_of(sums, batch), batch, total.dtype, False, piece.flat, context)]
        super().__init__(weighted([[reduce], [gather]], piece), rank, world_size)
        self.runs_in_c = in_c([codec, again], piece, self.memory)

    def share_total(self, memory: torch.Tensor | None) -> None:
        """Keep the sum in the first elements of this memory, of the sum's dtype; None: in memory of its own. Not where the sum is
        part of the gradient."""
        if memory is not None or self.total_is_shared:
            into = torch.empty_like(self.total) if memory is None else memory
            self.total.set_(into.untyped_storage(), 0, self.total.shape, self.total.stride())  # works hold the tensor
        self.total_is_shared = memory is not None

    def _own_term(self, add: bool) -> Work:
        """The own part becomes the sum, or is added to it."""
        mine = self.parts[self.rank]
        if isinstance(mine, Scattered):
            return Gather(self.total, mine, self.piece.shards[self.rank], add)
        return Add(self.total, mine) if add else Copy(self.total, mine)

    def take_shard(self, streams: Streams) -> None:
        """Before a gather phase alone: gather the own shard as it is."""
        if not self.in_place:
            self.total.copy_(self.piece.values(self.start, self.end))
        self._done = streams.mark()

    def take_back(self, start: int, end: int) -> None:
        self.piece.forget(start, end)
        self.of_sum.add("residual", start, self.piece.values(start, end))

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        for owner, own in enumerate(self.own):
            # of the own shard the second encode takes it, unless the first one encodes that shard, too
            by_sum = owner == self.rank and not self._encodes_own_part and what in self.of_sum.names
            (self.of_sum if by_sum else own).add(what, start, values)


class PlainTwoPhase(TwoPhase):
    """Two phases of uncompressed gradients. Where the lane has a wire, and sums have the gradients' dtype, `WireSum` does both;
    else every pair of ranks exchanges directly."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        super().__init__(codec, piece, group, root)
        self._on_wire: WireSum | None = None
        if piece.apart is None and piece.flat.dtype == piece.reduce_dtype and can_sum(piece.flat):
            self._on_wire = WireSum(piece.flat, group.grid, piece.bounds, by_node=False)
            self.bytes_to = self._on_wire.bytes_to

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        if self._on_wire is None or link.wire is None:
            super().post(link, tag, phases)
        self._tag = tag

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if self._on_wire is None or link.wire is None:
            super().run(phase, link, meter, ready)
            return
        link.wire.run(self._on_wire.operations((phase,), self._tag, link.wire.shared_with), meter)
        if phase == 0 and not self.in_place:
            self.total.copy_(self.piece.flat[self.start : self.end])


class ShardedSum(Transfers, OneEncode):
    """Reduce: shard j of every rank goes uncompressed to rank j, which adds the shards in rank order. The sum of the own shard is
    then in `total`; the flat buffer holds nothing of use. Gather: each owner sends its shard of the flat buffer to all ranks
    (ZeRO stage 1; Rajbhandari et al. 2020, section 5).

    Gathered shards arrive in the flat buffer itself: an owner gathers only after all ranks have sent it their gradients.
    """

    def __init__(self, piece: Piece, rank: int, world_size: int) -> None:
        flat = piece.flat
        parts = [flat[start:end] for start, end in pairwise(piece.bounds)]
        own = parts[rank]
        self.start, self.end = piece.bounds[rank], piece.bounds[rank + 1]
        """The own shard, from the piece's start."""
        self.total = torch.empty_like(own, dtype=piece.reduce_dtype)
        """The sum of the own shard, after the reduce phase."""
        arrivals = [torch.empty_like(own) if source != rank else own[:0] for source in range(world_size)]
        sent, arriving = ([part.view(torch.uint8) for part in several] for several in (parts, arrivals))
        self.memory = []
        self.aliases = [flat, *parts, *sent, arrivals[rank], arriving[rank]]
        reduce = Transfer([], sent, arriving)
        for source, arrived in enumerate(arrivals):
            part = own if source == rank else arrived
            reduce.arrivals[source] = [Add(self.total, part) if source else Copy(self.total, part)]
        gather = Transfer([], [sent[rank]] * world_size, sent, {source: [] for source in range(world_size)})
        super().__init__([[reduce], [gather]], rank, world_size)
        self.runs_in_c = in_c([], piece, [])

    def take_shard(self, streams: Streams) -> None:
        """See `TwoPhase.take_shard`: the gather phase sends the flat buffer anyway."""

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        self._done = ready  # the gather phase waits for the new values of the own shard, not for the reduce phase
        super().run(phase, link, meter, ready)


class Summing(OneEncode):
    """The payloads of each round are summed. The payload of a round is computed from the sum of the round before."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        self.piece, self.rank = piece, group.rank
        self.own = piece.memory(codec, 0, 0, piece.flat.numel(), piece.whole)
        self.memory = [self.own]
        self.program = codec.program(piece.flat, self.own.state, piece.whole)
        self.shared = self.program.shared
        self.aliases = [piece.flat]
        self._sums = [TensorSum(payload, group.grid) for payload in self.program.payloads]
        self.exchanges = TensorSum.exchanges * len(self._sums)
        self.bytes_to = [sum(each) for each in zip(*(of_round.bytes_to for of_round in self._sums), strict=True)]
        self.summed: Mark = None
        self._tag = 0

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self._tag = tag

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        context, last = self.piece.contexts[0], phase == len(self._sums) - 1
        before = ready if phase == 0 else self.summed
        with link.streams.encoding(before) as stream:
            meter.begins(link.streams)
            with meter.codec():
                self.own.take(link.streams)
                self.program.fill(phase, context.on(stream))
                if not last:
                    self.own.leave(link.streams)
        self._sums[phase].run(self._tag + TensorSum.exchanges * phase, link, meter, before)  # behind the fill, on its stream
        with link.streams.decoding() as stream:
            self.summed = link.streams.mark()
            if last:
                with meter.codec():
                    self.program.finish(context.on(stream))
                    self.own.keep(link.streams, self.piece.flat)


def around_ring(nbytes: int, rank: int, world_size: int) -> list[int]:
    """Bytes that a rank sends to each rank in an all-reduce of `nbytes` around a ring."""
    sent = round(2 * (world_size - 1) / world_size * nbytes)
    return [sent if to == (rank + 1) % world_size else 0 for to in range(world_size)]


def _payloads(piece: Piece, sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=piece.flat.device) for size in sizes]
