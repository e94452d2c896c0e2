"""Two phases over a grid of all ranks, of about as many rows as columns: messages are as long as among sqrt(n) ranks.

Rank i * columns + j is in row i and column j. A piece has a part for each column, and a part has a shard for each row. The sums
go through rows first, where parts are long, and then through columns. Grids of ranks for averages are in Ryabinin et al. 2021
(Moshpit SGD), section 3.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from gradwire.collectives.codec_state import Memory
from gradwire.collectives.ops import (
    Add,
    Copy,
    Decode,
    Encoding,
    Transfer,
    Transfers,
    Work,
    in_c,
    joined,
    payload_buffers,
    weighted,
)
from gradwire.collectives.piece import Piece
from gradwire.core import columns_of
from gradwire.kernels import Compressor, Segments
from gradwire.transport import Group


class VirtualGrid(Transfers):
    """Reduce: in each row, part j of every rank goes encoded to column j, which adds the parts. In each column, shard i of every
    sum goes encoded to row i, which adds the shards. Gather: each owner encodes the sum of its shard for its column; then the
    payloads of a column go along the rows, and all ranks, the owner too, use the decoded sums.
    """

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        self.piece, self.world_size, size = piece, group.world_size, group.world_size
        self.columns = columns_of(size)
        self.rows = size // self.columns
        self.row, self.column = divmod(group.rank, self.columns)
        self.codecs = (codec, codec.for_sum().summing(self.columns, size), codec.for_sum().summing(size, size))
        self.parts = piece.runs.cut(0, piece.flat.numel(), self.columns)
        self.shards = [piece.runs.cut(self.parts[j], self.parts[j + 1], self.rows) for j in range(self.columns)]
        """The edges of the parts, and of the shards of each part."""
        self.aliases = [piece.flat]
        self.memory: list[Memory] = []
        self._known: dict[tuple[int, int], Segments] = {}
        self._nothing = torch.empty(0, dtype=torch.uint8, device=piece.flat.device)
        start, end = self.parts[self.column], self.parts[self.column + 1]
        self._of_row, self._first = self._sum(start, end), start
        shard, end = self.shards[self.column][self.row], self.shards[self.column][self.row + 1]
        self._of_all = self._sum(shard, end)
        self.start, self.end = shard, end
        """The own shard, from the piece's start."""
        reduces = [self._along_row(), self._along_column()]
        phases = [[each] for each in [*reduces, *self._gathers()]]
        super().__init__(weighted(phases, piece), group.rank, size)
        self.remembers = codec.state
        self.runs_in_c = in_c(self.codecs, piece, self.memory)

    def _sum(self, start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, dtype=self.piece.reduce_dtype, device=self.piece.flat.device)

    def _flat(self, start: int, end: int) -> torch.Tensor:
        self.aliases.append(self.piece.flat[start:end])
        return self.aliases[-1]

    def _rank(self, row: int, column: int) -> int:
        return row * self.columns + column

    def _segments(self, start: int, end: int) -> Segments:
        if (run := (start, end)) not in self._known:
            self._known[run] = self.piece.runs.between(start, end)
        return self._known[run]

    def _bytes(self, encode: int, start: int, end: int) -> int:
        dtype = self.piece.reduce_dtype if encode else self.piece.flat.dtype
        return self.codecs[encode].payload_bytes(self._segments(start, end), dtype)

    def _encoding(self, encode: int, source: torch.Tensor, start: int, end: int, payload: torch.Tensor) -> Work:
        codec, segments = self.codecs[encode], self._segments(start, end)
        memory = self.piece.memory(codec, encode, start, end, segments)
        self.memory.append(memory)
        return Encoding(codec, source, memory, segments, self.piece.contexts[encode], payload)

    def _decode(self, encode: int, payload: torch.Tensor, start: int, end: int, add: bool, into: torch.Tensor) -> Work:
        codec, segments = self.codecs[encode], self._segments(start, end)
        dtype = self.piece.reduce_dtype if encode else self.piece.flat.dtype
        return Decode(codec, payload, segments, dtype, add, into, self.piece.contexts[encode])

    def _along_row(self) -> Transfer:
        """Send each part to its column, and add up the own one."""
        ranks = [self._rank(self.row, column) for column in range(self.columns)]
        sources = [self._flat(start, end) for start, end in pairwise(self.parts)]
        return self._adding(0, ranks, self.column, self.parts, sources, self._of_row)

    def _along_column(self) -> Transfer:
        """Send each shard of the row's sum to its row, and add up the own one."""
        ranks = [self._rank(row, self.column) for row in range(self.rows)]
        edges = self.shards[self.column]
        sources = [self._of_row[a - self._first : b - self._first] for a, b in pairwise(edges)]
        return self._adding(1, ranks, self.row, edges, sources, self._of_all)

    def _adding(
        self,
        encode: int,
        ranks: Sequence[int],
        place: int,
        edges: Sequence[int],
        sources: Sequence[torch.Tensor],
        total: torch.Tensor,
    ) -> Transfer:
        """Ranks that send each other the part of each place; every rank adds those of its own place, in the order of ranks."""
        transfer = Transfer.empty([], self.world_size, self._nothing)
        own_is_coded = self.codecs[encode].encodes_own_part
        for step in range(1, len(ranks) + 1):  # not all encode for the first rank first
            to = (place + step) % len(ranks)
            if to != place or own_is_coded:
                start, end = edges[to], edges[to + 1]
                payload = torch.empty(self._bytes(encode, start, end), dtype=torch.uint8, device=total.device)
                transfer.before.append(self._encoding(encode, sources[to], start, end, payload))
                transfer.sent[ranks[to]] = payload
        start, end = edges[place], edges[place + 1]
        for number, source in enumerate(ranks):
            if number == place and not own_is_coded:
                work: Work = Add(total, sources[place]) if number else Copy(total, sources[place])
            else:
                own = transfer.sent[source] if number == place else None
                arrived = torch.empty(self._bytes(encode, start, end), dtype=torch.uint8, device=total.device)
                payload = transfer.received[source] = arrived if own is None else own
                work = self._decode(encode, payload, start, end, number > 0, total)
            transfer.arrivals[source] = [work]
        return transfer

    def _gathers(self) -> list[Transfer]:
        """Send the own shard's sum along the column, and the column's sums along the row."""
        column, row = (Transfer.empty([], self.world_size, self._nothing) for _ in range(2))
        held = [self._payloads(j) for j in range(self.columns)]
        own = held[self.column]
        column.before.append(self._encoding(2, self._of_all, self.start, self.end, own[self.row]))
        for number, payload in enumerate(own):
            rank = self._rank(number, self.column)
            column.sent[rank], column.received[rank], column.arrivals[rank] = own[self.row], payload, []
        together = [joined(payloads, self._nothing)[0] for payloads in held]
        for number, payloads in enumerate(held):
            rank, edges = self._rank(self.row, number), self.shards[number]
            row.sent[rank], row.received[rank] = together[self.column], together[number]
            row.arrivals[rank] = [
                self._decode(2, payload, start, end, False, self._flat(start, end))
                for payload, (start, end) in zip(payloads, pairwise(edges), strict=True)
            ]
        return [column, row]

    def _payloads(self, column: int) -> list[torch.Tensor]:
        """The payloads of the sums of a part's shards, in one piece of memory."""
        edges = self.shards[column]
        sizes = [self._bytes(2, start, end) for start, end in pairwise(edges)]
        return payload_buffers(sizes, self.piece.flat.device)

    def take_back(self, start: int, end: int) -> None:
        self.piece.forget(start, end)
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
