"""CGX's ring and tree reductions, which decode, add and encode again at every hop (CGX, section 3).

Each rank encodes each element once, in a partial sum or in the whole sum. The payload of the whole sum reaches all ranks
unchanged, and all ranks decode it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from gradwire.collectives.ops import Add, Copy, Decode, Encoding, Transfer, Transfers, Work, in_c, weighted
from gradwire.collectives.piece import Piece
from gradwire.collectives.schemes import OneEncode
from gradwire.kernels import Compressor
from gradwire.transport import Group


class _Hops(Transfers, OneEncode):
    """The common part of ring and tree: partial sums in `reduce_dtype`, encoded and decoded by shard."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, bounds: Sequence[int]) -> None:
        rank, world_size = group.rank, group.world_size
        self.codec, self.piece, self.rank, self.world_size, self.bounds = codec, piece, rank, world_size, bounds
        shards = range(len(bounds) - 1)
        self.parts = [piece.flat[bounds[shard] : bounds[shard + 1]] for shard in shards]
        self.segments = [piece.runs.between(bounds[shard], bounds[shard + 1]) for shard in shards]
        self.sizes = [codec.payload_bytes(segments, piece.reduce_dtype) for segments in self.segments]
        longest = max(part.numel() for part in self.parts)
        self.total = torch.empty(longest, dtype=piece.reduce_dtype, device=piece.flat.device)
        self.aliases = [piece.flat, *self.parts]
        edges = zip(pairwise(bounds), self.segments, strict=True)
        self.memory = [piece.memory(codec, 0, start, end, segments) for (start, end), segments in edges]
        Transfers.__init__(self, weighted([self._up(), self._down()], piece), rank, world_size)
        self.runs_in_c = in_c([codec], piece, self.memory)

    def _up(self) -> list[Transfer]:
        raise NotImplementedError

    def _down(self) -> list[Transfer]:
        raise NotImplementedError

    def _payload(self, shard: int) -> torch.Tensor:
        return torch.empty(self.sizes[shard], dtype=torch.uint8, device=self.piece.flat.device)

    def _transfer(self, before: list[Work] | None = None) -> Transfer:
        """A transfer without parts."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.piece.flat.device)
        return Transfer.empty(before or [], self.world_size, nothing)

    def _sum_of(self, shard: int) -> torch.Tensor:
        return self.total[: self.parts[shard].numel()]

    def _encoding(self, shard: int, payload: torch.Tensor) -> Work:
        total, memory, segments = self._sum_of(shard), self.memory[shard], self.segments[shard]
        return Encoding(self.codec, total, memory, segments, self.piece.contexts[0], payload)

    def _decode(self, shard: int, payload: torch.Tensor, into: torch.Tensor, add: bool = False) -> Work:
        dtype, context = self.piece.reduce_dtype, self.piece.contexts[0]
        return Decode(self.codec, payload, self.segments[shard], dtype, add, into, context)


class Ring(_Hops):
    """Shard j starts at rank j + 1, adds one gradient at each of N - 1 hops, and ends at rank j. Then payloads go around
    again."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        super().__init__(codec, piece, group, piece.bounds)

    def _hop(self, payload: torch.Tensor, arrived: torch.Tensor) -> Transfer:
        """Send a payload to the next rank, and receive one from the rank before."""
        transfer = self._transfer()
        transfer.sent[(self.rank + 1) % self.world_size] = payload
        transfer.received[(self.rank - 1) % self.world_size] = arrived
        return transfer

    def _up(self) -> list[Transfer]:
        own, size = self.rank, self.world_size
        if size == 1:
            return [self._transfer([Copy(self._sum_of(own), self.parts[own])])]
        transfers = []
        for hop in range(size - 1):
            shard, arriving = (own - 1 - hop) % size, (own - 2 - hop) % size
            payload, arrived = self._payload(shard), self._payload(arriving)
            transfer = self._hop(payload, arrived)
            transfer.before += [Copy(self._sum_of(shard), self.parts[shard])] if hop == 0 else []
            transfer.before.append(self._encoding(shard, payload))
            total = self._sum_of(arriving)
            add_own = Add(total, self.parts[arriving])
            transfer.arrivals[(own - 1) % size] = [self._decode(arriving, arrived, total), add_own]
            transfers.append(transfer)
        return transfers

    def _down(self) -> list[Transfer]:
        own, size = self.rank, self.world_size
        payload = self._payload(own)
        first = [self._encoding(own, payload), self._decode(own, payload, self.parts[own])]
        if size == 1:
            return [self._transfer(first)]
        transfers = []
        for hop in range(size - 1):
            arriving = (own - 1 - hop) % size
            arrived = self._payload(arriving)
            transfer = self._hop(payload, arrived)
            transfer.before += first if hop == 0 else []
            transfer.arrivals[(own - 1) % size] = [self._decode(arriving, arrived, self.parts[arriving])]
            transfers.append(transfer)
            payload = arrived
        return transfers


class Tree(_Hops):
    """A binomial tree for any number of ranks. In round k the ranks at odd multiples of 2^k, counted from the root, send their
    partial sums to the rank 2^k below; the root's payload goes back the same way."""

    def __init__(self, codec: Compressor, piece: Piece, group: Group, root: int = 0) -> None:
        self.root = root
        super().__init__(codec, piece, group, (0, piece.flat.numel()))

    def _rounds(self) -> list[tuple[int | None, int | None]]:
        """For each round: the rank that gets this rank's sum, and the rank that sends its sum to this one."""
        size, distance, rounds = self.world_size, 1, []
        place = (self.rank - self.root) % size
        while distance < size:
            sends = place % (2 * distance) == distance
            receives = place % (2 * distance) == 0 and place + distance < size
            above = (self.rank - distance) % size if sends else None
            below = (self.rank + distance) % size if receives else None
            rounds.append((above, below))
            distance *= 2
        return rounds

    def _up(self) -> list[Transfer]:
        transfers = [self._transfer([Copy(self.total, self.piece.flat)])]
        for above, below in self._rounds():
            transfer = self._transfer()
            if above is not None:
                transfer.sent[above] = self._payload(0)
                transfer.before.append(self._encoding(0, transfer.sent[above]))
            if below is not None:
                arrived = transfer.received[below] = self._payload(0)
                transfer.arrivals[below] = [self._decode(0, arrived, self.total, add=True)]
            transfers.append(transfer)
        return transfers

    def _down(self) -> list[Transfer]:
        payload = self._payload(0)
        at_root = self.rank == self.root
        transfers = [self._transfer([self._encoding(0, payload)] if at_root else None)]
        for above, below in reversed(self._rounds()):
            transfer = self._transfer()
            if above is not None:
                transfer.received[above] = payload
                transfer.arrivals[above] = []
            if below is not None:
                transfer.sent[below] = payload
            transfers.append(transfer)
        transfers[-1].after.append(self._decode(0, payload, self.piece.flat))
        return transfers
