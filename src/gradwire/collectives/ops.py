"""The work of a rank before and after each exchange, made once and run in every step; and schemes made of such exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from gradwire.collectives.codec_state import JointMemory, Memory
from gradwire.collectives.piece import Energies, Piece, gathered
from gradwire.kernels import Batch, BatchPart, Compressor, Context, KernelCall, Scattered, Segments, cpu, refused, run_calls
from gradwire.transport import AllToAll, Link, Mark, Meter, Operations, Streams

if TYPE_CHECKING:
    from gradwire.transport import Wire

ALIGNMENT = 16
"""Payloads that are sent together begin at multiples of so many bytes: kernels load words, not bytes."""


class Work(ABC):
    """One operation on fixed tensors, as a list of kernel calls."""

    @abstractmethod
    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        """The calls, on CUDA for the current stream, which is `stream`."""

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        """Run the calls without C++'s list."""
        run_calls(self.calls(stream))


@dataclass(frozen=True)
class Copy(Work):
    """Copy values to `into`, in the dtype of `into`."""

    into: torch.Tensor
    source: torch.Tensor

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        return [("copy_into", self.into, self.source)]


@dataclass(frozen=True)
class Add(Work):
    """Add one term to a sum."""

    into: torch.Tensor
    source: torch.Tensor

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        return [("add_into", self.into, self.source)]


@dataclass(frozen=True)
class Gather(Work):
    """Copy elements that lie apart to `into`, times their factor and in the dtype of `into`, or add them."""

    into: torch.Tensor
    source: Scattered
    segments: Segments
    add: bool

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        return [("gather_rows", self.source, self.segments, self.add, self.into)]


@dataclass(frozen=True)
class Scale(Work):
    """Multiply elements that lie apart by their factor, where they are. float32."""

    into: Scattered
    segments: Segments

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        return [("scale_rows", self.into, self.segments)]


@dataclass(frozen=True)
class Weigh(Work):
    """Find the weights of a step, before its first encode."""

    energies: Energies
    segments: Segments

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        energy, weights, how = self.energies.energy, self.energies.weights, self.energies.how
        return [("weigh_elements", energy, self.segments, how.block, how.floor, weights)]


@dataclass(frozen=True)
class Learn(Work):
    """Add the squares of the decoded mean to the energies, after the last decode of a step."""

    energies: Energies
    mean: torch.Tensor | Scattered
    segments: Segments

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        return [("learn_energy", self.mean, self.segments, self.energies.how.keep, self.energies.energy)]


@dataclass(frozen=True)
class Encoding(Work):
    """Encode `source` into `payload`."""

    codec: Compressor
    source: torch.Tensor | Scattered
    memory: Memory | JointMemory
    segments: Segments
    context: Context
    payload: torch.Tensor

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        if isinstance(self.source, Scattered):
            replace(self, source=gathered(self.source, self.segments)).run(streams, stream)
            return
        with self.memory.open(streams, self.source):
            super().run(streams, stream)

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        source: Any = self.source  # a Scattered stands for a flat buffer
        context = self.context.on(stream)
        return self.codec.encode_calls(source, self.memory.state, self.segments, context, self.payload)


@dataclass(frozen=True)
class Decode(Work):
    """Decode a payload into `into`. `add`: add the values to `into` instead of overwriting."""

    codec: Compressor
    payload: torch.Tensor
    segments: Segments
    dtype: torch.dtype
    """The dtype of the values that were encoded."""
    add: bool
    into: torch.Tensor | Scattered
    context: Context

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        with refused(self.codec.spec):
            super().run(streams, stream)

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        into: Any = self.into  # as above
        context = self.context.on(stream)
        return self.codec.decode_calls(self.payload, self.segments, self.dtype, self.add, into, context)


@dataclass(frozen=True)
class DecodeSum(Work):
    """Add up the payloads of all ranks, in one launch where a device can."""

    terms: Sequence[Work]
    """This work, term by term."""
    codec: Compressor
    payloads: torch.Tensor
    """The payloads of all ranks, at multiples of `stride`. The own one is not read."""
    stride: int
    before: int
    """The ranks before the own one."""
    after: int
    own: torch.Tensor | None
    """The own term; None where the sum holds it from the begin on."""
    made: dict[torch.Stream | None, list[KernelCall]] = field(default_factory=dict, compare=False, repr=False)
    """The call for each stream. Its tensors are the same in every step."""

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        with refused(self.codec.spec):
            super().run(streams, stream)

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        if stream not in self.made:
            terms = [call for work in self.terms for call in work.calls(stream)]
            self.made[stream] = [("decode_sum", terms, self.payloads, self.stride, self.before, self.after, self.own)]
        return self.made[stream]


@dataclass
class Transfer:
    """One exchange with the work before and after it."""

    before: list[Work]
    """Work before the send."""
    sent: list[torch.Tensor]
    """The part for each rank."""
    received: list[torch.Tensor]
    """The buffer for the part from each rank."""
    arrivals: dict[int, list[Work]] = field(default_factory=dict)
    """Work on the part from each rank. The ranks' parts are awaited in the order of this dict, which has a key for each rank
    that sends a part: [] where there is nothing to do."""
    after: list[Work] = field(default_factory=list)
    """Work after all parts have arrived."""
    nothing: torch.Tensor | None = None
    """The part of ranks without one, in most places where ranks are many."""

    @staticmethod
    def empty(before: list[Work], world_size: int, nothing: torch.Tensor) -> "Transfer":
        """A transfer that sends and receives `nothing`."""
        return Transfer(before, [nothing] * world_size, [nothing] * world_size, nothing=nothing)

    def used(self, parts: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """The ranks with a part among these, and their parts."""
        return ((rank, part) for rank, part in enumerate(parts) if part is not self.nothing)


class Transfers:
    """A scheme whose phases are lists of transfers, one after another."""

    runs_in_c = False
    """Whether C++ runs the phases where the lane has a wire. The same on all ranks: each of their works has `calls`."""

    aliases: list[torch.Tensor]
    of_gradient: Sequence[Memory] = ()

    def __init__(self, phases: list[list[Transfer]], rank: int, world_size: int) -> None:
        self.phases, self.rank = phases, rank
        self.shared: dict[str, torch.Tensor] = {}
        every = [transfer for phase in phases for transfer in phase]
        for each in every:
            each.arrivals = each.arrivals or {rank: []}  # so that the decode stream waits for the work before
            for source, part in each.used(each.received):
                if part.numel() and source != rank and source not in each.arrivals:
                    raise ValueError(
                        f"a transfer of rank {rank} has a buffer for rank {source} and no arrivals[{source}]: nobody would wait "
                        f"for this part. Set arrivals[{source}] to the list of work on the part, or to [] if there is none."
                    )
        self.exchanges = len(every)
        self.bytes_to = [0] * world_size
        for each in every:
            for to, part in each.used(each.sent):
                self.bytes_to[to] += part.nbytes if to != rank else 0
        self._done: Mark = None
        self._posted: dict[int, list[AllToAll]] = {}
        self._tag = 0
        self._listed: dict[int, Operations] = {}
        self._listed_at = 0

    def post(self, link: Link, tag: int, phases: Sequence[int]) -> None:
        self._tag = tag
        if self.runs_in_c and link.wire is not None:
            return
        self._posted = {}
        for number, phase in enumerate(self.phases):
            if number in phases:
                self._posted[number] = [link.expect(at, each.received) for at, each in enumerate(phase, tag)]
            tag += len(phase)

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if self.runs_in_c and link.wire is not None:
            link.wire.run(self._operations(phase, link.wire), meter)
            return
        done = ready if phase == 0 else self._done
        for transfer, exchange in zip(self.phases[phase], self._posted[phase], strict=True):
            with link.streams.encoding(done) as stream:
                meter.begins(link.streams)
                _run_all(transfer.before, link.streams, stream, meter)
                exchange.send(transfer.sent)
            with link.streams.decoding() as stream:
                for source, works in transfer.arrivals.items():
                    exchange.wait(source)
                    _run_all(works, link.streams, stream, meter)
                exchange.finish()
                _run_all(transfer.after, link.streams, stream, meter)
                done = self._done = link.streams.mark()

    def _operations(self, phase: int, wire: "Wire") -> Operations:
        """The list that C++ runs. It is made anew when the bucket's memory has moved."""
        address = self.aliases[0].data_ptr()
        if address != self._listed_at:
            self._listed, self._listed_at = {}, address
        if phase not in self._listed:
            self._listed[phase] = made = Operations()
            tag = self._tag + sum(map(len, self.phases[:phase]))
            for at, each in enumerate(self.phases[phase], tag):
                self._add(each, at, made, wire.shared_with)
        return self._listed[phase]

    def _add(self, transfer: Transfer, tag: int, operations: Operations, shared_with: Sequence[int]) -> None:
        """List the work of `run`, except that a part leaves as soon as it is encoded, and elements that come through
        shared memory are copied or added straight from there."""
        world_size = len(transfer.sent)
        others = [(self.rank + step) % world_size for step in range(1, world_size)]
        targets = unsent = [to for to in others if transfer.sent[to].numel()]
        for work in transfer.before:
            _call_all([work], operations)
            encoded = getattr(work, "payload", None)
            for to in [to for to in unsent if transfer.sent[to] is encoded]:
                operations.send(to, transfer.sent[to], tag)
            unsent = [to for to in unsent if transfer.sent[to] is not encoded]
        for to in unsent:
            operations.send(to, transfer.sent[to], tag)
        for source, works in transfer.arrivals.items():
            arriving = transfer.received[source]
            if source != self.rank and arriving.numel():
                if source in shared_with and (only := self._only_use(arriving, works)):
                    operations.receive_elements(source, only.into, tag, isinstance(only, Add), only.source.dtype)
                    continue
                operations.receive(source, arriving, tag)
            _call_all(works, operations)
        if targets:
            operations.flush()
        _call_all(transfer.after, operations)

    def _only_use(self, arriving: torch.Tensor, works: Sequence[Work]) -> "Add | Copy | None":
        """The work that copies or adds the whole part, if nothing else in any phase reads the part's memory."""
        only = works[0] if len(works) == 1 else None
        if not isinstance(only, (Add, Copy)) or _place(only.source) != _place(arriving):
            return None
        memory, uses = arriving.untyped_storage().data_ptr(), 0
        for each in (transfer for phase in self.phases for transfer in phase):
            every = [*each.before, *(work for several in each.arrivals.values() for work in several), *each.after]
            held = [tensor for work in every for tensor in vars(work).values()]
            tensors = [tensor for tensor in [*each.sent, *held] if isinstance(tensor, torch.Tensor)]
            uses += sum(tensor.untyped_storage().data_ptr() == memory for tensor in tensors)
        return only if uses == 1 else None


def weighted(phases: list[list[Transfer]], piece: Piece) -> list[list[Transfer]]:
    """The phases, in which elements get the weights of the step first, and teach those of the next step last."""
    if piece.energies is not None:
        phases[0][0].before.insert(0, Weigh(piece.energies, piece.whole))
        mean = piece.flat if piece.apart is None else replace(piece.apart, factor=1.0)
        phases[-1][-1].after.append(Learn(piece.energies, mean, piece.whole))
    return phases


def in_c(codecs: Sequence[Compressor], piece: Piece, memory: Sequence[Memory]) -> bool:
    """Whether works with these codecs on this piece are calls of C++."""
    dtypes = {piece.flat.dtype, piece.reduce_dtype}
    return (
        piece.flat.is_cpu
        and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
        and cpu.available() is None
        and all(codec.runs_in_c for codec in codecs)
        and not any(each.narrow for each in memory)
    )


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _call_all(works: Sequence[Work], operations: Operations) -> None:
    for work in works:
        operations.call(cpu.call(*each) for each in work.calls())


def _run_all(works: Sequence[Work], streams: Streams, stream: torch.Stream | None, meter: Meter) -> None:
    if works:
        with meter.codec():
            for work in works:
                work.run(streams, stream)


def in_batches(codecs: Sequence[Compressor], piece: Piece) -> bool:
    """Whether one call encodes or decodes several payloads of the piece; otherwise each has a call of its own."""
    if not (piece.batched and piece.apart is None and piece.energies is None and all(codec.batches for codec in codecs)):
        return False
    return not any("residual" in codec.state for codec in codecs) or piece.store_for(piece.whole) is None


def payload_buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Payloads of these sizes, uint8, one after another in one allocation."""
    starts, end = _places(sizes)
    # zeros, since the gaps are sent too
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def payload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[list[torch.Tensor]]:
    """Lists of payloads of these sizes, in one allocation. Each list lies as in `payload_buffers`."""
    places = [_places(sizes) for sizes in lists]
    firsts, end = _places([end for _, end in places])
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return [
        [memory[first + start : first + start + size] for start, size in zip(starts, sizes, strict=True)]
        for first, (starts, _), sizes in zip(firsts, places, lists, strict=True)
    ]


def batch_of(
    codec: Compressor, dtype: torch.dtype, shards: Sequence[Segments], bounds: Sequence[int], sizes: Sequence[int]
) -> Batch:
    """The batch of the payloads of shards. bounds: the first element of each shard, and the end. sizes: bytes of payloads, which
    lie as in `payload_buffers`; 0 for a shard that has none. At least one has some."""
    starts, _ = _places(sizes)
    parts = [
        BatchPart(segments, low, high, at, at + size)
        for segments, (low, high), at, size in zip(shards, pairwise(bounds), starts, sizes, strict=True)
        if size
    ]
    made = Batch.of_parts(parts)
    inner: Compressor | None = codec
    while inner is not None:
        made.payload_bytes[inner.spec, dtype] = made.nbytes
        inner = getattr(inner, "inner", None)
    return made


def whole_of(payloads: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    """The memory of all payloads that `payload_buffers` made, as far as the batch has payloads."""
    return payloads[0].as_strided((batch.nbytes,), (1,), 0)


def joined(payloads: Sequence[torch.Tensor], nothing: torch.Tensor) -> tuple[torch.Tensor, list[Work]]:
    """One tensor of several payloads, placed as by `payload_buffers`. If the payloads lie elsewhere: also the copies to it."""
    if not payloads:
        return nothing, []
    first = payloads[0]
    if len(payloads) == 1:
        return first, []
    starts, end = _places([payload.numel() for payload in payloads])
    at = [payload.storage_offset() - first.storage_offset() for payload in payloads]
    if at == starts and len({payload.untyped_storage().data_ptr() for payload in payloads}) == 1:
        return first.as_strided((end,), (1,), first.storage_offset()), []
    together = payload_buffers([payload.numel() for payload in payloads], first.device)
    copies: list[Work] = [Copy(into, source) for into, source in zip(together, payloads, strict=True)]
    return together[0].as_strided((end,), (1,), 0), copies


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The start of each payload, and the end of the last one."""
    if len(sizes) == 1:
        return [0], sizes[0]
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + size
    return starts, end
