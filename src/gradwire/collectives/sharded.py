"""A sum of which every rank keeps its shard, and puts something else in its place before shards are gathered."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from gradwire.collectives.link import AllToAll, Link
from gradwire.collectives.memory import Memory
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Piece
from gradwire.collectives.streams import Mark, Streams

__all__ = ["ShardedSum"]


class ShardedSum:
    """Reduce: shard j of everybody goes to rank j as it is, which adds in rank order. The sum of the own shard is then in
    `total`, and nothing is left in the flat buffer. Gather: every rank gets what each owner has put into its shard of the
    flat buffer since (ZeRO stage 1; Rajbhandari et al. 2020, section 5).

    An owner gathers when it has all sums, so when its shard arrives here it has long been sent from here: it may arrive in
    the flat buffer itself.
    """

    exchanges = 2
    remembers: tuple[str, ...] = ()

    def __init__(self, piece: Piece, rank: int, world_size: int) -> None:
        flat, self.rank = piece.flat, rank
        self.parts = [flat[start:end] for start, end in pairwise(piece.bounds)]
        own = self.parts[rank]
        self.start = piece.bounds[rank]
        """The first element of the own shard, from the piece's start."""
        self.total = torch.empty_like(own, dtype=piece.reduce_dtype)
        """The sum of the own shard, after the reduce phase."""
        self.arrivals = [torch.empty_like(own) if source != rank else own[:0] for source in range(world_size)]
        self.memory: list[Memory] = []
        self.shared: dict[str, torch.Tensor] = {}
        self._sent = [part.view(torch.uint8) for part in self.parts]
        self._arriving = [part.view(torch.uint8) for part in self.arrivals]
        self.aliases = [flat, *self.parts, *self._sent, self.arrivals[rank], self._arriving[rank]]
        numels = [0 if to == rank else self.parts[to].numel() + own.numel() for to in range(world_size)]
        self.bytes_to = [numel * flat.element_size() for numel in numels]

    def take_shard(self, streams: Streams) -> None:
        """Before a gather phase alone: the own shard of the flat buffer is what is gathered."""

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        if 0 in phases:
            self.reduce: AllToAll = link.expect(tag, self._arriving)
        if 1 in phases:
            self.gather: AllToAll = link.expect(tag + 1, self._sent)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0:
            self._reduce(link, meter, ready)
        else:
            self._gather(link, ready)

    def _reduce(self, link: Link, meter: Meter, ready: Mark) -> None:
        with link.streams.encoding(ready):
            self.reduce.send(self._sent)
        with link.streams.decoding():
            for source, arrived in enumerate(self.arrivals):
                self.reduce.wait(source)
                part = self.parts[self.rank] if source == self.rank else arrived
                with meter.codec():
                    if source:
                        self.total.add_(part)
                    else:
                        self.total.copy_(part)
            self.reduce.finish()

    def _gather(self, link: Link, ready: Mark) -> None:
        with link.streams.encoding(ready):
            self.gather.send([self._sent[self.rank]] * len(self._sent))
        with link.streams.decoding():
            for source in range(len(self._sent)):
                self.gather.wait(source)
            self.gather.finish()

    def take_back(self, start: int, end: int) -> None:
        pass

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        pass
