"""A sum of which every rank keeps its own shard. Later each rank replaces its shard, and all shards are gathered."""

from itertools import pairwise

import torch

from gradwire.collectives.link import Link
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Piece
from gradwire.collectives.schemes import OneEncode
from gradwire.collectives.streams import Mark, Streams
from gradwire.collectives.works import Add, Copy, Transfer, Transfers

__all__ = ["ShardedSum"]


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
        self.start = piece.bounds[rank]
        """The first element of the own shard, from the piece's start."""
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

    def take_shard(self, streams: Streams) -> None:
        """See `TwoPhase.take_shard`: the gather phase sends the flat buffer anyway."""

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        self._done = ready  # the gather phase waits for the new values of the own shard, not for the reduce phase
        super().run(phase, link, meter, ready)
