"""Itineraries: what one rank encodes, sends, receives and decodes in each task of an option. No tensors.

All ranks are followed through the tasks together, since a rank receives what another holds. A rank holds either values (a range
of the piece, with the gradients of some ranks added) or a list of payloads. Several payloads may stand for the same elements of
different ranks that are not yet added (ByteComp's footnote 2).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from gradwire.core import ROUTINES
from gradwire.transport import Grid

Cut = Callable[[int, int, int], Sequence[int]]
"""cut(start, end, parts): parts + 1 edges at which the codec allows a cut."""


class Parcel(NamedTuple):
    """One payload."""

    encode: int
    """The number of the encode, from 0."""
    maker: int
    """The rank of the encode."""
    start: int
    end: int
    """The elements of the piece in the payload."""
    ranks: frozenset[int]
    """The ranks of the gradients in the sum."""
    summed: bool
    """Whether the maker added the encoded values, in the bucket's reduce_dtype; otherwise they have the gradient's dtype."""


class ParcelRun(NamedTuple):
    """Values of a range of elements."""

    start: int
    end: int


class Held(NamedTuple):
    """The values or payloads of a rank between two tasks."""

    start: int
    end: int
    ranks: frozenset[int]
    """The ranks of the gradients, added or not."""
    summed: bool = False
    """Whether this rank added the values."""
    parcels: tuple[Parcel, ...] | None = None
    """Payloads in the order of their sum; None if the rank holds values."""

    def inside(self, start: int, end: int) -> tuple[Parcel, ...] | tuple[ParcelRun, ...]:
        """The part in a range of elements."""
        if self.parcels is not None:
            return tuple(parcel for parcel in self.parcels if start <= parcel.start and parcel.end <= end)
        low, high = max(start, self.start), min(end, self.end)
        return (ParcelRun(low, high),) if low < high else ()


@dataclass(frozen=True)
class Encode:
    """An encode of the values of this rank."""

    number: int
    device: str
    start: int
    end: int
    parcels: tuple[Parcel, ...]
    kept: frozenset[Parcel]
    """The parcels that no other rank gets, so that they need no encoding."""
    voice: int
    """The lowest rank with the same values. All ranks with the same values draw the same random numbers, to make the same
    payloads, and the loss of the encode counts once."""
    ranks: frozenset[int]
    """The ranks of the gradients in the values."""


class ParcelMove(NamedTuple):
    """The part of this rank in one exchange. `sent` and `received` also have what the rank keeps."""

    sent: dict[int, tuple[Parcel, ...] | tuple[ParcelRun, ...]]
    received: dict[int, tuple[Parcel, ...] | tuple[ParcelRun, ...]]
    adds: bool
    held: Held | None
    """The values or payloads of the rank afterwards."""


@dataclass
class Leg:
    """A link task with the encode before and the decode after: one phase of the engine."""

    encode: Encode | None
    """None if this rank encodes nothing."""
    moves: list[ParcelMove] = field(default_factory=list)
    """One exchange; all-reduce has two."""
    decode: str = ""
    """The device that decodes and adds the arrived payloads; '' for no decode."""


def itinerary(tasks: Sequence[str], grid: Grid, root: int, numel: int, cut: Cut) -> list[Leg]:
    """The legs of the grid's own rank for a piece of `numel` elements. `root` is the rank that rooted schemes go through.

    >>> halves = lambda start, end, parts: [start + (end - start) * part // parts for part in range(parts + 1)]
    >>> first, second = itinerary(["reducescatter:inter", "allgather:inter"], Grid.even(2, 1, 0), 0, 10, halves)
    >>> first.moves[0].sent[1], first.moves[0].held.start, first.moves[0].held.end
    ((ParcelRun(start=5, end=10),), 0, 5)
    """
    journey = _Journey(grid, root, cut, numel, flat=not any(task.endswith(":intra") for task in tasks))
    legs: list[Leg] = []
    encode: Encode | None = None
    for position, task in enumerate(tasks):
        word, _, where = task.partition(":")
        if word == "comp":
            encode = journey.encode(where, tasks[position + 1 :])
        elif word == "decomp":
            legs[-1].decode = where
            journey.decode()
        else:
            steps = ("reducescatter", "allgather") if word == "allreduce" else (word,)
            legs.append(Leg(encode, [journey.move(step, where) for step in steps]))
            encode = None
    for leg in legs:
        if leg.encode is not None:
            leg.encode = replace(leg.encode, kept=frozenset(leg.encode.parcels) - journey.travelled)
    return legs


class _Journey:
    """The state of all ranks."""

    def __init__(self, grid: Grid, root: int, cut: Cut, numel: int, flat: bool) -> None:
        self.grid, self.root, self.cut, self.flat = grid, root, cut, flat
        self.held: list[Held | None] = [Held(0, numel, frozenset({rank})) for rank in range(grid.world_size)]
        self.encodes = 0
        self.travelled: set[Parcel] = set()
        """Parcels of this rank that other ranks got."""

    def _groups(self, link: str) -> tuple[tuple[int, ...], ...]:
        return self.grid.groups("all" if self.flat else link)

    def encode(self, device: str, following: Sequence[str]) -> Encode | None:
        """Make parcels of all values, cut as finely as the link tasks before the next decode need."""
        number, found = self.encodes, None
        self.encodes += 1
        lowest: dict[tuple[int, int, frozenset[int]], int] = {}
        for rank, held in enumerate(self.held):
            if held is None:
                continue
            units = [ParcelRun(held.start, held.end)]
            for parts in self._cuts_before_decode(following):
                units = [unit for whole in units for unit in self._shards(whole, parts)]
            parcels = tuple(Parcel(number, rank, *unit, held.ranks, held.summed) for unit in units if unit.start < unit.end)
            voice = lowest.setdefault((held.start, held.end, held.ranks), rank)
            self.held[rank] = held._replace(parcels=parcels)
            if rank == self.grid.rank:
                found = Encode(number, device, held.start, held.end, parcels, frozenset(), voice, held.ranks)
        return found

    def _cuts_before_decode(self, following: Sequence[str]) -> Iterable[int]:
        for task in following:
            word, _, where = task.partition(":")
            if word == "decomp":
                return
            if ROUTINES[word].gets == "owners":
                yield len(self._groups(where)[0])

    def _shards(self, whole: ParcelRun, parts: int) -> list[ParcelRun]:
        edges = self.cut(whole.start, whole.end, parts)
        return [ParcelRun(start, end) for start, end in pairwise(edges)]

    def decode(self) -> None:
        """All ranks add their payloads; payloads of whole sums are not added to others."""
        for rank, held in enumerate(self.held):
            if held is not None:
                terms = any(len(parcel.ranks) < self.grid.world_size for parcel in held.parcels or ())
                self.held[rank] = held._replace(parcels=None, summed=terms)

    def move(self, word: str, link: str) -> ParcelMove:
        """One exchange in every group of the link."""
        adds = ROUTINES[word].adds
        own = ParcelMove({}, {}, adds, None)
        after: list[Held | None] = [None] * len(self.held)
        for group in self._groups(link):
            holders = {rank: held for rank in group if (held := self.held[rank]) is not None}
            if not holders:
                continue
            whole = ParcelRun(min(held.start for held in holders.values()), max(held.end for held in holders.values()))
            ranks = frozenset[int]().union(*(held.ranks for held in holders.values()))
            coded = any(held.parcels is not None for held in holders.values())
            for target, region in self._regions(word, group, whole).items():
                parts = {source: held.inside(*region) for source, held in holders.items()}
                parcels = tuple(item for part in parts.values() for item in part if isinstance(item, Parcel))
                after[target] = Held(*region, ranks, adds, parcels if coded else None)
                self.travelled |= {p for p in parcels if p.maker == self.grid.rank != target}
                if target == self.grid.rank:
                    own.received.update(parts)
                if self.grid.rank in parts:
                    own.sent[target] = parts[self.grid.rank]
        self.held = after
        return own._replace(held=after[self.grid.rank])

    def _regions(self, word: str, group: Sequence[int], whole: ParcelRun) -> dict[int, ParcelRun]:
        """The range that each member of the group gets; members that get nothing are left out."""
        gets = ROUTINES[word].gets
        if gets == "everybody":
            return dict.fromkeys(group, whole)
        if gets == "root":
            return {self.grid.root_of(tuple(group), self.root): whole}
        return dict(zip(group, self._shards(whole, len(group)), strict=True))
