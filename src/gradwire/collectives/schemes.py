"""Schemes: how a piece of a bucket is synchronised. Each is a list of phases that the engine runs in launch order.

A scheme is made once for a piece (a chunk of a bucket) with all its buffers, and then only runs. It knows a compressor
by its two functions and nothing of plans. Every rank ends with the same bits: what is summed is summed in rank order,
and what is used is what was decoded from bytes that all ranks have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradwire.collectives.link import Link
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

    phases: tuple[str, ...]
    wire_bytes: int
    """Bytes this rank sends."""
    residuals: list[torch.Tensor]
    """One per encode, when the codec feeds back."""

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        """Do one phase. `ready` marks the moment from which the flat buffer holds the gradient."""
        ...


class AllReduce:
    """Summed on the wire by the backend, in the tensor's dtype; nothing is encoded."""

    phases = ("allreduce",)

    def __init__(self, flat: torch.Tensor, link_ranks: int) -> None:
        self.flat = flat
        self.residuals: list[torch.Tensor] = []
        self.wire_bytes = round(2 * (link_ranks - 1) / link_ranks * flat.numel() * flat.element_size())

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        with link.streams.encoding(ready):
            work = link.all_reduce(self.flat)
        with link.streams.decoding(), meter.wire():
            work.wait()


class AllGather:
    """Each rank encodes once and gets everybody's payload: one encode's error, world_size - 1 payloads sent."""

    phases = ("allgather",)

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece = codec, piece
        size = codec.payload_bytes(piece.whole, piece.flat.dtype)
        device = piece.flat.device
        self.sent = torch.empty(size, dtype=torch.uint8, device=device)
        self.received = torch.empty(world_size * size, dtype=torch.uint8, device=device)
        self.payloads = list(self.received.split(size)) if size else [self.sent] * world_size
        wide = piece.flat.dtype != piece.reduce_dtype
        self.total = torch.empty_like(piece.flat, dtype=piece.reduce_dtype) if wide else piece.flat
        self.residuals = [_residual(piece.flat, piece)] if codec.feeds_back else []
        self.wire_bytes = (world_size - 1) * size

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        flat, piece, context = self.piece.flat, self.piece, self.piece.contexts[0]
        with link.streams.encoding(ready):
            with meter.codec():
                self.codec.encode(flat, self.residuals[0] if self.residuals else None, piece.whole, context, self.sent)
            work = link.all_gather(self.received, self.sent)
        with link.streams.decoding():
            with meter.wire():
                work.wait()
            with meter.codec():
                for source, payload in enumerate(self.payloads):
                    self.codec.decode(payload, piece.whole, flat.dtype, source > 0, self.total, context)
                if self.total is not flat:
                    flat.copy_(self.total)


class TwoPhase:
    """Reduce: shard j of everybody goes encoded to rank j, which adds in rank order, its own part as it is. Gather: the
    owner encodes the sum again and all ranks, the owner too, use what that decodes to (CGX's SRA; notes D2, D3).
    """

    phases = ("alltoall", "allgather")

    def __init__(self, codec: Codec, piece: Piece, rank: int, world_size: int) -> None:
        self.codec, self.piece, self.rank, self.world_size = codec, piece, rank, world_size
        dtype, device = piece.flat.dtype, piece.flat.device
        bounds = piece.bounds
        self.parts = [piece.flat[bounds[j] : bounds[j + 1]] for j in range(world_size)]
        sizes = [codec.payload_bytes(segments, dtype) for segments in piece.shards]
        own, others = sizes[rank], [j for j in range(world_size) if j != rank]
        self.others = others

        def buffer(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        # the reduce phase sends another shard to everybody and receives everybody's part of the own shard
        self.reduce_send_sizes = [0 if j == rank else sizes[j] for j in range(world_size)]
        self.reduce_receive_sizes = [0 if j == rank else own for j in range(world_size)]
        self.reduce_sent, self.reduce_received = buffer(sum(sizes) - own), buffer(own * (world_size - 1))
        self.reduce_payloads = _parts(self.reduce_sent, self.reduce_send_sizes)
        self.reduce_arrivals = _parts(self.reduce_received, self.reduce_receive_sizes)
        # the gather phase sends the own sum to everybody: sizes are those of the reduce phase, exchanged
        self.gather_sent, self.gather_received = buffer(own * (world_size - 1)), buffer(sum(sizes) - own)
        self.own_payload = self.gather_sent[:own]
        self.gather_copies = [self.gather_sent[k * own : (k + 1) * own] for k in range(1, world_size - 1)]
        self.gather_arrivals = _parts(self.gather_received, self.reduce_send_sizes)
        self.total = torch.empty_like(self.parts[rank], dtype=piece.reduce_dtype)
        self.residuals = [_residual(piece.flat, piece), _residual(self.total, piece)] if codec.feeds_back else []
        self.sent_residuals = (
            [self.residuals[0][bounds[j] : bounds[j + 1]] for j in range(world_size)] if self.residuals else None
        )
        self.wire_bytes = self.reduce_sent.numel() + self.gather_sent.numel()
        self.fold_own = False
        """Set when residuals came from another layout: what the own shard carries joins the own part, once."""
        self.summed: Mark = None

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0:
            self._reduce(link, meter, ready)
        else:
            self._gather(link, meter)

    def _reduce(self, link: Link, meter: Meter, ready: Mark) -> None:
        piece, codec, context = self.piece, self.codec, self.piece.contexts[0]
        mine, segments, dtype = self.parts[self.rank], piece.shards[self.rank], piece.flat.dtype
        with link.streams.encoding(ready):
            with meter.codec():
                for j in self.others:
                    residual = self.sent_residuals[j] if self.sent_residuals else None
                    codec.encode(self.parts[j], residual, piece.shards[j], context, self.reduce_payloads[j])
                if self.fold_own and self.sent_residuals:
                    mine.add_(self.sent_residuals[self.rank])
                    self.sent_residuals[self.rank].zero_()
                    self.fold_own = False
            work = link.all_to_all(
                self.reduce_received, self.reduce_sent, self.reduce_receive_sizes, self.reduce_send_sizes
            )
        with link.streams.decoding():
            with meter.wire():
                work.wait()
            with meter.codec():
                for source in range(self.world_size):
                    if source != self.rank:
                        codec.decode(self.reduce_arrivals[source], segments, dtype, source > 0, self.total, context)
                    elif source:
                        self.total.add_(mine)
                    else:
                        self.total.copy_(mine)
            self.summed = link.streams.mark()

    def _gather(self, link: Link, meter: Meter) -> None:
        piece, codec, context = self.piece, self.codec, self.piece.contexts[1]
        segments, dtype = piece.shards[self.rank], piece.flat.dtype
        with link.streams.encoding(self.summed):
            with meter.codec():
                residual = self.residuals[1] if self.residuals else None
                codec.encode(self.total, residual, segments, context, self.own_payload)
                for copy in self.gather_copies:
                    copy.copy_(self.own_payload)
            work = link.all_to_all(
                self.gather_received, self.gather_sent, self.reduce_send_sizes, self.reduce_receive_sizes
            )
            with meter.codec():
                codec.decode(self.own_payload, segments, dtype, False, self.parts[self.rank], context)
        with link.streams.decoding():
            with meter.wire():
                work.wait()
            with meter.codec():
                for j in self.others:
                    codec.decode(self.gather_arrivals[j], piece.shards[j], dtype, False, self.parts[j], context)


def _residual(like: torch.Tensor, piece: Piece) -> torch.Tensor:
    return torch.zeros_like(like, dtype=piece.residual_dtype)


def _parts(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    parts, at = [], 0
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += size
    return parts


