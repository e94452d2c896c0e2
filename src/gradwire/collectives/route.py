"""Routes: any option of ByteComp's tree as a scheme, one phase for each link task, flat or hierarchical.

A route gives tensors to the option's itinerary, by the rules of the two-phase scheme. Sums are taken in rank order. A payload
that no other rank gets is not encoded: its maker adds the values unchanged. The maker of a payload for all ranks decodes the
payload too. Parts are decoded as they arrive; payloads that go on undecoded travel as lists (ByteComp's footnote 2). Partial
sums have the bucket's `reduce_dtype`; a whole sum that travels uncompressed has the gradient's dtype.

On a device one call encodes all payloads of an encode, and one decodes all that arrive, where the codec takes batches: either
terms of one sum, of which the own one is not encoded, or whole sums of successive elements.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradwire.collectives.codec_state import JointMemory, Memory
from gradwire.collectives.itinerary import Encode, Leg, Parcel, ParcelMove, ParcelRun, itinerary
from gradwire.collectives.ops import (
    ALIGNMENT,
    Add,
    Copy,
    Decode,
    DecodeSum,
    Encoding,
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
from gradwire.kernels import Batch, Compressor, KernelCall, Segments
from gradwire.transport import Grid, Link, Mark, Meter, Streams


class Route(Transfers):
    """An option's tasks, run by one rank."""

    def __init__(self, tasks: Sequence[str], codecs: Mapping[str, Compressor], piece: Piece, grid: Grid, root: int) -> None:
        """`codecs` has the codec of each device that the tasks name; `root` is the rank that rooted schemes go through."""
        used = [codecs[task.partition(":")[2]] for task in tasks if task.startswith(("comp:", "decomp:"))]
        every = [each for codec in used for each in (codec, codec.for_sum())]
        self.piece, self._packing = piece, _Packing(codecs, piece, grid, in_batches(every, piece))
        legs = itinerary(tasks, grid, root, piece.flat.numel(), piece.runs.cut)
        phases = [self._packing.leg(leg) for leg in legs]
        self._add_left = _AddLeft(self)
        phases[0][0].before.insert(0, self._add_left)
        phases[-1][-1].after += self._packing.into_flat()
        super().__init__(weighted(phases, piece), grid.rank, grid.world_size)
        self.aliases = [piece.flat, *self._packing.aliases]
        self.remembers = used[0].state if used else ()
        like = [piece.memory(used[0], 0, 0, 0, piece.runs.between(0, 0))] if used else []  # of ranks that encode nothing, too
        self.runs_in_c = in_c(every, piece, like)
        self.voices = self._packing.voices
        """For each encode of this rank the lowest rank that encodes the same values: both use the random numbers of that rank."""
        self.of_gradient = self._packing.own
        self.left: Memory | None = None
        """Values to add to the next gradient, if there are any."""

    @property
    def memory(self) -> list[Memory]:
        """The memory of each encode, and the values to add to the next gradient."""
        left = self.left  # a lane may drop it
        return [*self._packing.memory, *([left] if left else [])]

    def run(self, phase: int, link: Link, meter: Meter, ready: Mark) -> None:
        if phase == 0 and self.runs_in_c and link.wire is not None:
            self._add_left.run(link.streams, None)
        super().run(phase, link, meter, ready)

    def take_back(self, start: int, end: int) -> None:
        self.piece.forget(start, end)
        if "residual" in self.remembers and self.rank == 0:
            self.take_over("residual", start, self.piece.flat[start:end])

    def take_over(self, what: str, start: int, values: torch.Tensor) -> None:
        """Add to the memory of the first encode where it covers this rank's own gradient; add the rest to the next gradient."""
        rest = values.clone()
        for own in self._packing.own:
            own.add(what, start, values)
            rest[max(0, own.start - start) : max(0, own.end - start)] = 0.0
        if what == "residual" and rest.any():
            if self.left is None:
                random = self.piece.store_contexts[0].random
                self.left = Memory((what,), "left", 0, self.piece.flat.numel(), store=None, random=random)
            self.left.add(what, start, rest)


@dataclass(frozen=True)
class _AddLeft(Work):
    """Add the values left from earlier steps to the gradient, once."""

    route: Route

    def run(self, streams: Streams, stream: torch.Stream | None) -> None:
        if self.route.left is not None:
            (left,) = self.route.left.state
            self.route.piece.flat.add_(left)
            streams.keep(left)
            self.route.left = None

    def calls(self, stream: torch.Stream | None = None) -> list[KernelCall]:
        """None: there is something left after a change of plans only. `Route.run` adds it before the list."""
        return []


class _Packing:
    """Makes the tensors and works of an itinerary, leg by leg. Its state is what the rank holds after the last leg."""

    def __init__(self, codecs: Mapping[str, Compressor], piece: Piece, grid: Grid, batched: bool) -> None:
        """batched: whether one call encodes or decodes several payloads."""
        self.codecs, self.piece, self.grid, self._batched = codecs, piece, grid, batched
        self.values, self.start = piece.flat, 0
        self.payloads: dict[Parcel, torch.Tensor] = {}
        self.kept: dict[Parcel, torch.Tensor] = {}
        """The values of parcels without encoding."""
        self.memory: list[Memory] = []
        self.voices: dict[int, int] = {}
        self.own: list[Memory] = []
        """The memory of the first encode if it encodes this rank's own gradient alone."""
        self.aliases: list[torch.Tensor] = []
        self._known: dict[tuple[int, int], Segments] = {}
        """Segments by their first element and their end."""
        self._nbytes: dict[tuple[int, int, bool, bool], int] = {}
        """Bytes of payloads: by the same, whether it is the first encode, and whether it is of a sum."""
        self._of_sums: dict[tuple[bool, str, int], Compressor] = {}
        self._apart: dict[int, torch.Tensor] = {}
        """The sums that do not lie in the bucket's memory, by `id`."""

    def leg(self, leg: Leg) -> list[Transfer]:
        """One exchange, or two for all-reduce."""
        before = self._encode(leg.encode) if leg.encode is not None else []
        transfers = []
        for move in leg.moves:
            transfers.append(self._transfer(move, before, leg.decode))
            before = []
        return transfers

    def into_flat(self) -> list[Work]:
        """Copy the sum to the bucket's memory, in its dtype, if the sum is elsewhere."""
        end = self.start + self.values.numel()
        target = self._of_flat(self.start, end)
        if end == self.start or self.values.data_ptr() == target.data_ptr():
            return []
        works: list[Work] = [Copy(target, self.values)]
        self.values = target
        return works

    # ---- encode

    def _encode(self, encode: Encode) -> list[Work]:
        codec = self._codec(encode.number, encode.device, encode.ranks)
        if encode.start < encode.end:
            self.voices[encode.number] = encode.voice
        copy, context = encode.voice != self.grid.rank, self.piece.contexts[encode.number]
        made = [parcel for parcel in encode.parcels if parcel not in encode.kept or codec.encodes_own_part]
        shared = None
        if self._batched and len(made) > 1:
            shared = JointMemory(codec.state, encode.end - encode.start, self.piece.flat.device)
        memory = {
            parcel: self.piece.memory(
                codec, encode.number, parcel.start, parcel.end, self._segments(parcel), copy,
                None if shared is None else shared.part(parcel.start - encode.start, parcel.end - encode.start),
            )
            for parcel in encode.parcels
        }  # fmt: skip
        self.memory += memory.values()
        if len(encode.ranks) == 1 and encode.number == 0:
            self.own = [memory[parcel] for parcel in made]
        self.kept = {parcel: self._part(parcel.start, parcel.end) for parcel in encode.parcels if parcel not in made}
        sizes = [0 if parcel in self.kept else self._bytes_of(parcel) for parcel in encode.parcels]
        buffers = payload_buffers(sizes, self.piece.flat.device)
        self.payloads = {
            parcel: payload for parcel, payload in zip(encode.parcels, buffers, strict=True) if parcel not in self.kept
        }
        if shared is not None:
            batch = self._batch(codec, encode.parcels, sizes)
            whole = self._part(encode.start, encode.end)
            return [Encoding(codec, whole, shared, batch, context, whole_of(buffers, batch))]
        return [
            Encoding(codec, self._part(each.start, each.end), memory[each], self._segments(each), context, payload)
            for each, payload in self.payloads.items()
        ]

    def _batch(self, codec: Compressor, parcels: Sequence[Parcel], sizes: Sequence[int]) -> Batch:
        """The payloads of parcels of successive elements, which lie as in `payload_buffers`. sizes: see `batch_of`."""
        bounds = [parcel.start for parcel in parcels] + [parcels[-1].end]
        segments = [self._segments(parcel) for parcel in parcels]
        return batch_of(codec, self._dtype_of(parcels[0]), segments, [edge - bounds[0] for edge in bounds], sizes)

    def _codec(self, encode: int, device: str, ranks: Collection[int]) -> Compressor:
        """`ranks`: those whose gradients are in the sum."""
        key = encode == 0, device, len(ranks)
        if key not in self._of_sums:
            codec = self.codecs[device] if encode == 0 else self.codecs[device].for_sum()
            self._of_sums[key] = codec.summing(len(ranks), self.grid.world_size)
        return self._of_sums[key]

    def _segments(self, item: Parcel | ParcelRun) -> Segments:
        run = item.start, item.end
        if run not in self._known:
            self._known[run] = self.piece.runs.between(*run)
        return self._known[run]

    def _bytes_of(self, parcel: Parcel) -> int:
        key = parcel.start, parcel.end, parcel.encode == 0, parcel.summed
        if key not in self._nbytes:
            codec = next(iter(self.codecs.values()))
            codec = codec if parcel.encode == 0 else codec.for_sum()
            self._nbytes[key] = codec.payload_bytes(self._segments(parcel), self._dtype_of(parcel))
        return self._nbytes[key]

    def _dtype_of(self, parcel: Parcel) -> torch.dtype:
        return self.piece.reduce_dtype if parcel.summed else self.piece.flat.dtype

    # ---- exchange

    def _transfer(self, move: ParcelMove, before: list[Work], decode: str) -> Transfer:
        arrives = (item for items in move.received.values() for item in items)
        if self.payloads or self.kept or any(isinstance(item, Parcel) for item in arrives):
            return self._send_payloads(move, before, decode)
        return self._sum_values(move, before) if move.adds else self._spread_values(move, before)

    def _send_payloads(self, move: ParcelMove, before: list[Work], decode: str) -> Transfer:
        nothing = torch.empty(0, dtype=torch.uint8, device=self.piece.flat.device)
        transfer = Transfer.empty(before, self.grid.world_size, nothing)
        lists: dict[tuple[Parcel, ...], torch.Tensor] = {}
        for target, items in move.sent.items():
            if target != self.grid.rank:
                parcels = tuple(item for item in items if isinstance(item, Parcel))
                if parcels not in lists:
                    lists[parcels], copies = joined([self.payloads[parcel] for parcel in parcels], nothing)
                    before += copies
                transfer.sent[target] = lists[parcels]
        arriving = {source: [item for item in items if isinstance(item, Parcel)] for source, items in move.received.items()}
        if self._at_once([parcel for parcels in arriving.values() for parcel in parcels], decode):
            self._decode_at_once(move, arriving, decode, transfer)
            return transfer
        here = {parcel: self.payloads[parcel] for parcel in arriving.pop(self.grid.rank, ()) if parcel in self.payloads}
        sizes = [[self._bytes_of(parcel) for parcel in parcels] for parcels in arriving.values()]
        for source, buffers in zip(arriving, payload_lists(sizes, self.piece.flat.device), strict=True):
            here |= dict(zip(arriving[source], buffers, strict=True))
            transfer.received[source] = joined(buffers, nothing)[0]
        self.payloads = here
        if decode and move.held is not None:
            self._decode(move, decode, transfer)
        else:
            transfer.arrivals = {source: [] for source in move.received}
        return transfer

    def _at_once(self, parcels: Sequence[Parcel], device: str) -> bool:
        """Whether one call decodes these: the terms of a sum, of which this rank keeps one, or whole sums."""
        if not (device and self._batched and len(parcels) > 1):
            return False
        alike = {(each.encode, self._codec(each.encode, device, each.ranks), self._dtype_of(each)) for each in parcels}
        if len(alike) > 1:
            return False
        keeps = sum(parcel in self.kept for parcel in parcels)
        if len({(parcel.start, parcel.end) for parcel in parcels}) == 1:
            ((_, codec, _),) = alike
            return keeps == 1 and codec.adds_payloads(self._segments(parcels[0])) and self._bytes_of(parcels[0]) > 0
        return not keeps and all(one.end == other.start for one, other in pairwise(parcels))

    def _decode_at_once(
        self, move: ParcelMove, arriving: Mapping[int, Sequence[Parcel]], device: str, transfer: Transfer
    ) -> None:
        """Decode all parcels in one call. They arrive in one allocation, with a place for those of this rank."""
        parcels = [parcel for of_source in arriving.values() for parcel in of_source]
        nothing, own = transfer.received[self.grid.rank], list[Work]()
        lists = payload_lists([[self._bytes_of(each) for each in of_source] for of_source in arriving.values()], nothing.device)
        place = next((at for at, parcel in enumerate(parcels) if parcel in self.kept), None)
        for (source, of_source), payloads in zip(arriving.items(), lists, strict=True):
            if source != self.grid.rank:
                transfer.received[source] = joined(payloads, nothing)[0]
            elif of_source and place is None:
                made, own = joined([self.payloads[parcel] for parcel in of_source], nothing)
                own.append(Copy(joined(payloads, nothing)[0], made))
        payloads = [payload for of_source in lists for payload in of_source]
        self.payloads, kept = dict(zip(parcels, payloads, strict=True)), self.kept
        self._decode(move, device, transfer)
        terms = [work for works in transfer.arrivals.values() for work in works]
        transfer.arrivals = {source: own if source == self.grid.rank else [] for source in arriving}
        first = parcels[0]
        codec, dtype = self._codec(first.encode, device, first.ranks), self._dtype_of(first)
        if place is not None:
            stride = -(-payloads[0].numel() // ALIGNMENT) * ALIGNMENT
            memory, after = joined(payloads, nothing)[0], len(parcels) - 1 - place
            transfer.after = [DecodeSum(terms, codec, memory, stride, place, after, kept[parcels[place]])]
        else:
            batch = self._batch(codec, parcels, [payload.numel() for payload in payloads])
            into, context = self._part(first.start, parcels[-1].end), self.piece.contexts[first.encode]
            transfer.after = [Decode(codec, whole_of(payloads, batch), batch, dtype, False, into, context)]

    def _decode(self, move: ParcelMove, device: str, transfer: Transfer) -> None:
        """Add up what arrives, part by part."""
        held = move.held
        assert held is not None
        flat, everybody = self.piece.flat, self.grid.world_size
        parcels = [item for items in move.received.values() for item in items if isinstance(item, Parcel)]
        nothing_added = all(len(parcel.ranks) == everybody for parcel in parcels)
        gradient_done_with = len(held.ranks) == everybody and not self.kept
        if nothing_added or (gradient_done_with and flat.dtype == self.piece.reduce_dtype):
            total = self._of_flat(held.start, held.end)
        else:
            total = self._empty(held.end - held.start)
        begun: set[ParcelRun] = set()
        for source, items in move.received.items():
            works = transfer.arrivals[source] = []
            for parcel in items:
                assert isinstance(parcel, Parcel)
                run = ParcelRun(parcel.start, parcel.end)
                works.append(self._added(parcel, device, total, held.start, add=run in begun))
                begun.add(run)
        self.values, self.start, self.payloads, self.kept = total, held.start, {}, {}

    def _added(self, parcel: Parcel, device: str, total: torch.Tensor, start: int, add: bool) -> Work:
        into = self._view(total, parcel.start - start, parcel.end - start)
        if parcel in self.kept:
            return Add(into, self.kept[parcel]) if add else Copy(into, self.kept[parcel])
        codec, context = self._codec(parcel.encode, device, parcel.ranks), self.piece.contexts[parcel.encode]
        dtype = self._dtype_of(parcel)
        return Decode(codec, self.payloads[parcel], self._segments(parcel), dtype, add, into, context)

    def _sum_values(self, move: ParcelMove, before: list[Work]) -> Transfer:
        """Send all parts of a range to one rank, which adds them in rank order."""
        transfer = self._values_to(move, before)
        if move.held is None:
            self.values = self.values[:0]
            self._apart[id(self.values)] = self.values
            return transfer
        total = self._empty(move.held.end - move.held.start)
        for position, source in enumerate(move.received):
            own = self._part(move.held.start, move.held.end) if source == self.grid.rank else None
            part = transfer.received[source] if own is None else own
            transfer.arrivals[source] = [Add(total, part) if position else Copy(total, part)]
        self.values, self.start = total, move.held.start
        return transfer

    def _spread_values(self, move: ParcelMove, before: list[Work]) -> Transfer:
        """Send whole sums to ranks without them."""
        if self.grid.rank in move.received:
            before = before + self.into_flat()
        transfer = self._values_to(move, before)
        for source, items in move.received.items():
            received = transfer.received[source]
            others = [item for item in items if source != self.grid.rank]
            transfer.arrivals[source] = [Copy(self._of_flat(item.start, item.end), received) for item in others]
        if move.held is not None:
            self.values, self.start = self._of_flat(move.held.start, move.held.end), move.held.start
        return transfer

    def _values_to(self, move: ParcelMove, before: list[Work]) -> Transfer:
        dtype = self.values.dtype if move.adds else self.piece.flat.dtype
        nothing = torch.empty(0, dtype=dtype, device=self.piece.flat.device)
        transfer = Transfer.empty(before, self.grid.world_size, nothing)
        for other, items in move.sent.items():
            for item in items if other != self.grid.rank else ():
                transfer.sent[other] = self._part(item.start, item.end)
        for other, items in move.received.items():
            for item in items if other != self.grid.rank else ():
                transfer.received[other] = nothing.new_empty(item.end - item.start)
        return transfer

    # ---- views

    def _empty(self, numel: int) -> torch.Tensor:
        """Memory for a sum, apart from the bucket's."""
        made = torch.empty(numel, dtype=self.piece.reduce_dtype, device=self.piece.flat.device)
        self._apart[id(made)] = made
        return made

    def _part(self, start: int, end: int) -> torch.Tensor:
        """This rank's values of a range."""
        return self._view(self.values, start - self.start, end - self.start)

    def _of_flat(self, start: int, end: int) -> torch.Tensor:
        return self._view(self.piece.flat, start, end)

    def _view(self, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        view = tensor[start:end]
        if id(tensor) not in self._apart:
            self.aliases.append(view)
        return view
