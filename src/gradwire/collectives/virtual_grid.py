"""Two phases over a grid of all ranks, of about as many rows as columns: messages are as long as among sqrt(n) ranks.

Rank i * columns + j is in row i and column j. A piece has a part for each column, and a part has a shard for each row. The sums
go through rows first, where parts are long, and then through columns. Grids of ranks for averages are in Ryabinin et al. 2021
(Moshpit SGD), section 3.

A shorter last row cuts the piece into as many parts as it has ranks. These own no shards: each sends the sum of its part, shard
by shard, to the shards' owners, which add it last, and gets the means of its part from them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

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
    Transfer,
    Transfers,
    Work,
    batch_of,
    in_batches,
    in_c,
    joined,
    payload_buffers,
    payload_lists,
    weighted,
    whole_of,
)
from gradwire.collectives.piece import Piece
from gradwire.core import rows_of
from gradwire.kernels import Batch, Compressor, Scattered, Segments
from gradwire.transport import Group


class VirtualGrid(Transfers):
    """Reduce: in each row, part j of every rank goes encoded to column j, which adds the parts. In each column, shard i of every
    sum goes encoded to row i, which adds the shards. Gather: each owner encodes the sum of its shard for its column; then the
    payloads of a column go along the rows, and all ranks, the owner too, use the decoded sums.

    On a device a piece has one call for each of its three encodes, one decode for each sum, and one for the means, where the
    codec takes batches. Tensors that travel uncompressed take more calls.
    """

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        self.piece, self.world_size, size, self._own = piece, group.world_size, group.world_size, group.rank
        rows = rows_of(size)
        self.columns, self.rows = rows[0], rows.count(rows[0])
        self.row, self.column = divmod(group.rank, self.columns)
        self.codecs = (codec, codec.for_sum().summing(self.columns, size), codec.for_sum().summing(size, size))
        self._batched = in_batches(self.codecs, piece)
        self.edges, whole, short = self._cut(rows[-1])
        """The edges of the shards. Shard j * rows + i belongs to row i and column j."""
        self.runs = whole if self.row < self.rows else short
        """The numbers of shards at which the parts of the own row begin, and the end."""
        own = range(self.runs[self.column], self.runs[self.column + 1])
        self.owners = [self._rank(shard % self.rows, shard // self.rows) for shard in own]
        """The ranks that own the shards of the own part."""
        self.senders: list[int] = []
        """The ranks that send their rows' sums of the own shard. Ranks of a short row own none."""
        if self.row < self.rows:
            self.senders += self.owners
            if rows[-1] < self.columns:
                self.senders.append(self._rank(self.rows, bisect_right(short, own[self.row]) - 1))
        self.aliases = [piece.flat]
        self.memory: list[Memory] = []
        self._known: dict[tuple[int, int], Segments] = {}
        self._nothing = torch.empty(0, dtype=torch.uint8, device=piece.flat.device)
        self._of_row = self._sum(self.edges[own.start], self.edges[own.stop])
        self.start, self.end = (self.edges[own[self.row] + at] for at in (0, 1)) if self.senders else (0, 0)
        """The own shard, from the piece's start."""
        self._of_all = self._sum(self.start, self.end)
        reduces = [self._along_row(), self._along_column()]
        phases = [[each] for each in [*reduces, *self._gathers()]]
        super().__init__(weighted(phases, piece), group.rank, size)
        self.remembers = codec.state
        self.runs_in_c = in_c(self.codecs, piece, self.memory)

    def _cut(self, last: int) -> tuple[list[int], list[int], list[int]]:
        """The edges of the shards, the runs of a whole row, and those of the last row, which has so many ranks. Its parts end at
        edges of shards, too: so shards may be of two sizes."""
        cut, edges, numel = self.piece.runs.cut, [0], self.piece.gradient.numel()
        meets = cut(0, numel, last)
        for start, end in pairwise(cut(0, numel, self.columns)):
            at = next((edge for edge in meets if start < edge < end), end)
            near = self.rows if at == end else min(max(1, round(self.rows * (at - start) / (end - start))), self.rows - 1)
            edges += cut(start, at, near)[1:]
            edges += cut(at, end, self.rows - near)[1:] if at < end else ()
        end = len(edges) - 1
        return edges, list(range(0, end + 1, self.rows)), [*(bisect_left(edges, edge) for edge in meets[:-1]), end]

    def _sum(self, start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, dtype=self.piece.reduce_dtype, device=self.piece.flat.device)

    def _gradient(self, start: int, end: int) -> torch.Tensor | Scattered:
        part = self.piece.gradient[start:end]
        if isinstance(part, torch.Tensor):
            self.aliases.append(part)
        return part

    def _rank(self, row: int, column: int) -> int:
        return row * self.columns + column

    def _segments(self, start: int, end: int) -> Segments:
        if (run := (start, end)) not in self._known:
            self._known[run] = self.piece.runs.between(start, end)
        return self._known[run]

    def _bytes(self, encode: int, start: int, end: int) -> int:
        return self.codecs[encode].payload_bytes(self._segments(start, end), self._dtype(encode))

    def _dtype(self, encode: int) -> torch.dtype:
        """The dtype of what an encode encodes."""
        return self.piece.reduce_dtype if encode else self.piece.flat.dtype

    def _memory(self, encode: int, start: int, end: int, within: dict[str, torch.Tensor] | None = None) -> Memory:
        memory = self.piece.memory(self.codecs[encode], encode, start, end, self._segments(start, end), within=within)
        self.memory.append(memory)
        return memory

    def _encoding(self, encode: int, source: torch.Tensor | Scattered, memory: Memory, payload: torch.Tensor) -> Work:
        segments = self._segments(memory.start, memory.end)
        return Encoding(self.codecs[encode], source, memory, segments, self.piece.contexts[encode], payload)

    def _decode(self, encode: int, payload: torch.Tensor, segments: Segments, add: bool, into: torch.Tensor | Scattered) -> Work:
        return Decode(self.codecs[encode], payload, segments, self._dtype(encode), add, into, self.piece.contexts[encode])

    def _along_row(self) -> Transfer:
        """Send each part to its rank of the row, and add up the own one."""
        ranks = [self._rank(self.row, column) for column in range(len(self.runs) - 1)]
        edges = [self.edges[shard] for shard in self.runs]
        sources = [self._gradient(start, end) for start, end in pairwise(edges)]
        return self._adding(0, ranks, ranks, edges, self.piece.flat, sources, self._of_row)

    def _along_column(self) -> Transfer:
        """Send each shard of the row's sum to its owner, and add up the own one."""
        edges = self.edges[self.runs[self.column] : self.runs[self.column + 1] + 1]
        sources = [self._of_row[a - edges[0] : b - edges[0]] for a, b in pairwise(edges)]
        return self._adding(1, self.owners, self.senders, edges, self._of_row, sources, self._of_all)

    def _adding(
        self,
        encode: int,
        owners: Sequence[int],
        senders: Sequence[int],
        edges: Sequence[int],
        whole: torch.Tensor,
        sources: Sequence[torch.Tensor | Scattered],
        total: torch.Tensor,
    ) -> Transfer:
        """Send each part to its owner, and add up the own part of all senders, in their order. The own rank has the same place
        among owners and senders, or is not among them. `sources`: the parts, which are one after another in `whole`, or lie
        apart."""
        transfer = Transfer.empty([], self.world_size, self._nothing)
        own_is_coded = self.codecs[encode].encodes_own_part
        place = senders.index(self._own) if senders else -1
        transfer.before = self._encodes(encode, owners, place, edges, whole, sources, transfer.sent)
        if not senders:
            return transfer
        start, end = edges[place], edges[place + 1]
        segments, size, works, own = self._segments(start, end), self._bytes(encode, start, end), list[Work](), sources[place]
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        arriving = torch.empty(len(senders) * stride, dtype=torch.uint8, device=total.device)
        for number, source in enumerate(senders):
            if number == place and not own_is_coded:
                works.append(_own_term(total, own, segments, add=number > 0))
            else:
                payload = transfer.sent[source] if number == place else arriving[number * stride : number * stride + size]
                transfer.received[source] = payload
                works.append(self._decode(encode, payload, segments, number > 0, total))
        adds = self._batched and self.codecs[encode].adds_payloads(segments)
        if adds and not own_is_coded and size and len(senders) > 1 and isinstance(own, torch.Tensor):
            after = len(senders) - 1 - place
            transfer.arrivals = {source: [] for source in senders}
            transfer.after = [DecodeSum(works, self.codecs[encode], arriving, stride, place, after, own)]
        else:
            transfer.arrivals = {source: [work] for source, work in zip(senders, works, strict=True)}
        return transfer

    def _encodes(
        self,
        encode: int,
        ranks: Sequence[int],
        place: int,
        edges: Sequence[int],
        whole: torch.Tensor,
        sources: Sequence[torch.Tensor | Scattered],
        sent: list[torch.Tensor],
    ) -> list[Work]:
        """Encode the part of each place, into payloads that are put into `sent`."""
        codec, first = self.codecs[encode], edges[0]
        sizes = [
            self._bytes(encode, start, end) if to != place or codec.encodes_own_part else 0
            for to, (start, end) in enumerate(pairwise(edges))
        ]
        payloads = payload_buffers(sizes, whole.device)
        shared = JointMemory(codec.state, edges[-1] - first, whole.device) if self._batched else None
        works = list[Work]()
        for step in range(1, len(ranks) + 1):  # not all encode for the first rank first
            to = (place + step) % len(ranks)
            if to != place or codec.encodes_own_part:
                start, end = edges[to], edges[to + 1]
                within = None if shared is None else shared.part(start - first, end - first)
                memory = self._memory(encode, start, end, within)
                works.append(self._encoding(encode, sources[to], memory, payloads[to]))
                sent[ranks[to]] = payloads[to]
        if shared is None or not any(sizes):
            return works
        batch = self._batch(encode, edges, sizes)
        return [Encoding(codec, whole, shared, batch, self.piece.contexts[encode], whole_of(payloads, batch))]

    def _gathers(self) -> list[Transfer]:
        """Send the own shard's sum to those who sent terms of it, and the sums of the own part along the row."""
        column, row = (Transfer.empty([], self.world_size, self._nothing) for _ in range(2))
        parts = [self.edges[first : end + 1] for first, end in pairwise(self.runs)]
        sizes = [[self._bytes(2, start, end) for start, end in pairwise(edges)] for edges in parts]
        held = payload_lists(sizes, self.piece.flat.device)
        own = held[self.column]
        for rank, payload in zip(self.owners, own, strict=True):
            column.received[rank], column.arrivals[rank] = payload, []
        if self.senders:
            column.before.append(self._encoding(2, self._of_all, self._memory(2, self.start, self.end), own[self.row]))
            column.sent = [own[self.row] if rank in self.senders else self._nothing for rank in range(self.world_size)]
        together = [joined(payloads, self._nothing)[0] for payloads in held]
        for number, (edges, payloads) in enumerate(zip(parts, held, strict=True)):
            rank = self._rank(self.row, number)
            row.sent[rank], row.received[rank] = together[self.column], together[number]
            row.arrivals[rank] = [
                self._decode(2, payload, self._segments(start, end), False, self._gradient(start, end))
                for payload, (start, end) in zip(payloads, pairwise(edges), strict=True)
            ]
        every = [size for of_part in sizes for size in of_part]
        if self._batched and any(every):
            row.arrivals = {rank: [] for rank in row.arrivals}
            batch = self._batch(2, self.edges, every)
            row.after = [self._decode(2, whole_of(held[0], batch), batch, False, self.piece.flat)]
        return [column, row]

    def _batch(self, encode: int, edges: Sequence[int], sizes: Sequence[int]) -> Batch:
        """The payloads of successive runs, which lie as in `payload_buffers`."""
        segments = [self._segments(start, end) for start, end in pairwise(edges)]
        return batch_of(self.codecs[encode], self._dtype(encode), segments, [edge - edges[0] for edge in edges], sizes)

    def take_back(self, start: int, end: int) -> None:
        self.piece.forget(start, end)
        if self.senders:  # the owners
            self.memory[-1].add("residual", start, self.piece.values(start, end))

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        # a later encode takes what the earlier ones leave unencoded: the own part, and the own shard of it
        encodes = {"0"}
        for number, codec in enumerate(self.codecs[:2]):
            if codec.encodes_own_part:
                break
            encodes.add(str(number + 1))
        for memory in self.memory:
            if memory.encode in encodes:
                memory.add(what, start, values)


def _own_term(total: torch.Tensor, own: torch.Tensor | Scattered, segments: Segments, add: bool) -> Work:
    """The own part becomes the sum, or is added to it."""
    if isinstance(own, Scattered):
        return Gather(total, own, segments, add)
    return Add(total, own) if add else Copy(total, own)
