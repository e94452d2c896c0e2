"""Itineraries: what one rank encodes, sends, receives and decodes in each task of an option. No tensors.

A rank holds either values (a range of the piece, with the gradients of some ranks added) or a list of payloads. Several payloads
may stand for the same elements of different ranks that are not yet added (ByteComp's footnote 2).

An itinerary has two steps. A `_Course` follows the own rank through the tasks of an option, and asks what another rank holds only
where a message needs it. It knows ranges as shards of shards, without numbers, so all pieces that run an option share one course.
`_Measure` then turns the shards of one piece into elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from gradwire.core import ROUTINES, pairs_ranks
from gradwire.transport import Grid

Cut = Callable[[int, int, int], Sequence[int]]
"""cut(start, end, parts): parts + 1 edges at which the codec allows a cut."""


class Parcel(NamedTuple):
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
    """The legs of the grid's own rank for a piece of `numel` elements: not to be changed, since pieces of one size share them.
    `root` is the rank that rooted schemes go through.

    >>> halves = lambda start, end, parts: [start + (end - start) * part // parts for part in range(parts + 1)]
    >>> first, second = itinerary(["reducescatter:inter", "allgather:inter"], Grid.even(2, 1, 0), 0, 10, halves)
    >>> first.moves[0].sent[1], first.moves[0].held.start, first.moves[0].held.end
    ((ParcelRun(start=5, end=10),), 0, 5)
    """
    rooted = any(ROUTINES[word].gets == "root" for word, _ in map(_parts, tasks) if word in ROUTINES)
    course = _course(tuple(tasks), grid, root if rooted else 0)
    measure = _Measure(numel, cut)
    size = numel, measure.edges_of(course.cuts)
    if course.latest is None or course.latest[0] != size:  # pieces of one size follow each other
        course.latest = size, [measure.leg(leg) for leg in course.legs]
    return course.latest[1]


class _ShardRange(NamedTuple):
    """The parts `first` to `end` of a range that is cut into `parts`."""

    whole: "_ShardRange | None"
    """None for the piece itself."""
    parts: int
    first: int
    end: int

    def part(self, parts: int, number: int) -> "_ShardRange":
        return _ShardRange(self, parts, number, number + 1) if parts > 1 else self

    def is_inside(self, other: "_ShardRange") -> bool:
        """Whether all its elements are those of the other one, too."""
        inner: _ShardRange | None = self
        while inner is not None:
            if inner[:2] == other[:2] and other.first <= inner.first and inner.end <= other.end:
                return True
            inner = inner.whole
        return False

    def part_of(self, whole: "_ShardRange", parts: int) -> int | None:
        """The number of the part of `whole` that this range is inside of."""
        inner: _ShardRange | None = self
        while inner is not None and (inner.whole, inner.parts) != (whole, parts):
            inner = inner.whole
        return inner.first if inner is not None and inner.end == inner.first + 1 else None


_PIECE = _ShardRange(None, 1, 0, 1)
_Edges = tuple[tuple[int, ...], ...]
"""The edges of each cut."""


class _Unit(NamedTuple):
    """A payload before its elements are known."""

    encode: int
    maker: int
    shard: _ShardRange
    ranks: frozenset[int]
    summed: bool


class _Overlap(NamedTuple):
    """Values: the elements of both ranges."""

    one: _ShardRange
    other: _ShardRange


_Items = tuple[_Unit, ...] | tuple[_Overlap, ...]


class _Holding(NamedTuple):
    """A rank between two tasks."""

    shard: _ShardRange
    ranks: frozenset[int]
    summed: bool
    """Whether this rank added the values."""
    coded: bool
    """Whether it holds payloads."""
    partial: bool
    """Whether some of these are not of whole sums."""


class _Pool(NamedTuple):
    """The ranks of a group that hold something before an exchange, and all that they hold."""

    holders: tuple[int, ...]
    whole: _ShardRange
    ranks: frozenset[int]
    coded: bool
    partial: bool


class _EncodeBefore(NamedTuple):
    """An encode before its elements are known."""

    number: int
    device: str
    shard: _ShardRange
    units: tuple[_Unit, ...]
    kept: frozenset[_Unit]
    voice: int
    ranks: frozenset[int]


class _MoveBefore(NamedTuple):
    """An exchange before its elements are known."""

    sent: dict[int, _Items]
    received: dict[int, _Items]
    adds: bool
    held: _Holding | None


class _LegBefore(NamedTuple):
    encode: _EncodeBefore | None
    moves: list[_MoveBefore]
    decode: str


@lru_cache(maxsize=64)
def _course(tasks: tuple[str, ...], grid: Grid, root: int) -> "_Course":
    return _Course(tasks, grid, root)


class _Course:
    """The own rank's way through an option. All-reduce counts as two tasks."""

    def __init__(self, tasks: Sequence[str], grid: Grid, root: int) -> None:
        self._grid, self._root = grid, root
        flat = not any(task.endswith(":intra") for task in tasks)
        if pairs_ranks(tasks):
            _ = grid.ranks_per_node  # raises where some ranks have no partner on each node
        self._legs = [_steps(task) for task in tasks]
        self._tasks = [step for steps in self._legs for step in steps]
        links = {where for word, where in self._tasks if word in ROUTINES}
        self._group: dict[str, dict[int, tuple[int, ...]]] = {
            link: {rank: group for group in grid.groups("all" if flat else link) for rank in group} for link in links
        }
        self._known: dict[tuple[int, int], _Holding | None] = {}
        self._pools: dict[tuple[int, tuple[int, ...]], _Pool | None] = {}
        self._numbers = [sum(word == "comp" for word, _ in self._tasks[:at]) for at in range(len(self._tasks))]
        """The number of the encode that is the task at each position."""
        self.latest: tuple[tuple[int, _Edges], list[Leg]] | None = None
        """The elements and the cuts of the latest piece, and its legs."""

    @cached_property
    def cuts(self) -> list[tuple[_ShardRange, int]]:
        """The ranges that the own rank's legs cut, and into how many parts; whole ranges before their parts."""
        found: dict[tuple[_ShardRange, int], None] = {}

        def add(shard: _ShardRange) -> None:
            if shard.whole is not None:
                add(shard.whole)
                found[shard.whole, shard.parts] = None

        for leg in self.legs:
            if leg.encode is not None:
                add(leg.encode.shard)
                for unit in leg.encode.units:
                    add(unit.shard)
            for move in leg.moves:
                if move.held is not None:
                    add(move.held.shard)
                for item in (item for items in (*move.sent.values(), *move.received.values()) for item in items):
                    for shard in (item.shard,) if isinstance(item, _Unit) else (item.one, item.other):
                        add(shard)
        return list(found)

    @cached_property
    def legs(self) -> list[_LegBefore]:
        """The legs of the own rank."""
        legs: list[_LegBefore] = []
        encode: _EncodeBefore | None = None
        at = 0
        for steps in self._legs:
            word, where = steps[0]
            if word == "comp":
                encode = self._encode(at)
            elif word == "decomp":
                legs[-1] = legs[-1]._replace(decode=where)
            else:
                legs.append(_LegBefore(encode, [self._move(at + step) for step in range(len(steps))], ""))
                encode = None
            at += len(steps)
        own = self._grid.rank
        sent = (move.sent for leg in legs for move in leg.moves)
        travelled = {item for targets in sent for target, items in targets.items() if target != own for item in items}
        for number, leg in enumerate(legs):
            if leg.encode is not None:
                kept = frozenset(unit for unit in leg.encode.units if unit not in travelled)
                legs[number] = leg._replace(encode=leg.encode._replace(kept=kept))
        return legs

    # ---- what ranks hold

    def _holding(self, rank: int, at: int) -> _Holding | None:
        """Return what a rank holds before the task at this position; None for nothing."""
        if (rank, at) not in self._known:
            self._known[rank, at] = self._found(rank, at)
        return self._known[rank, at]

    def _found(self, rank: int, at: int) -> _Holding | None:
        if at == 0:
            return _Holding(_PIECE, frozenset({rank}), False, False, False)
        word = self._tasks[at - 1][0]
        if word in ROUTINES:
            pool = self._pool(rank, at - 1)
            shard = self._gets(rank, at - 1) if pool is not None else None
            if pool is None or shard is None:
                return None
            return _Holding(shard, pool.ranks, ROUTINES[word].adds, pool.coded, pool.partial)
        before = self._holding(rank, at - 1)
        if before is None:
            return None
        if word == "comp":
            return before._replace(coded=True, partial=len(before.ranks) < self._grid.world_size)
        # payloads of whole sums are not added to others
        return before._replace(coded=False, summed=before.partial, partial=False)

    def _pool(self, rank: int, at: int) -> _Pool | None:
        """Return what the group of a rank holds before an exchange."""
        group = self._group[self._tasks[at][1]][rank]
        if (at, group) not in self._pools:
            holdings = {member: held for member in group if (held := self._holding(member, at)) is not None}
            self._pools[at, group] = _pooled(holdings) if holdings else None
        return self._pools[at, group]

    def _gets(self, rank: int, at: int) -> _ShardRange | None:
        """The range that a rank gets in an exchange; None for nothing."""
        word, where = self._tasks[at]
        group, gets = self._group[where][rank], ROUTINES[word].gets
        pool = self._pool(rank, at)
        if pool is None or (gets == "root" and rank != self._grid.root_of(group, self._root)):
            return None
        return pool.whole.part(len(group), group.index(rank)) if gets == "owners" else pool.whole

    def _items(self, rank: int, at: int, region: _ShardRange) -> _Items:
        """Return the part of a region that a rank holds before the task at this position."""
        held = self._holding(rank, at)
        if held is None:
            return ()
        if not held.coded:
            return (_Overlap(held.shard, region),)
        if self._tasks[at - 1][0] == "comp":
            return tuple(self._units(rank, at - 1, held, region))
        if held.shard.is_inside(region):
            region = held.shard
        pool = self._pool(rank, at - 1)
        assert pool is not None
        return tuple(unit for source in pool.holders for unit in self._items(source, at - 1, region) if isinstance(unit, _Unit))

    def _units(self, rank: int, at: int, held: _Holding, region: _ShardRange) -> list[_Unit]:
        """The payloads of an encode inside a region, cut as finely as the exchanges before the next decode need."""
        shards = [held.shard]
        for parts in self._cuts_after(at):
            finer = []
            for shard in shards:
                if shard.is_inside(region):
                    finer += [shard.part(parts, number) for number in range(parts)]
                elif (number := region.part_of(shard, parts)) is not None:
                    finer.append(shard.part(parts, number))
            shards = finer
        number = self._numbers[at]
        return [_Unit(number, rank, shard, held.ranks, held.summed) for shard in shards if shard.is_inside(region)]

    def _cuts_after(self, at: int) -> list[int]:
        cuts = []
        for word, where in self._tasks[at + 1 :]:
            if word == "decomp":
                break
            if ROUTINES[word].gets == "owners" and (parts := len(self._group[where][0])) > 1:
                cuts.append(parts)
        return cuts

    # ---- the own rank's part

    def _encode(self, at: int) -> _EncodeBefore | None:
        own, held = self._grid.rank, self._holding(self._grid.rank, at)
        if held is None:
            return None
        same = (rank for rank in range(own) if (other := self._holding(rank, at)) is not None and other[:2] == held[:2])
        units = tuple(self._units(own, at, held, held.shard))
        return _EncodeBefore(self._numbers[at], self._tasks[at][1], held.shard, units, frozenset(), next(same, own), held.ranks)

    def _move(self, at: int) -> _MoveBefore:
        """One exchange in the own rank's group."""
        word, where = self._tasks[at]
        own, pool = self._grid.rank, self._pool(self._grid.rank, at)
        regions = {rank: region for rank in self._group[where][own] if (region := self._gets(rank, at)) is not None}
        sent: dict[int, _Items] = {}
        if pool is not None and own in pool.holders:
            sent = {target: self._items(own, at, region) for target, region in regions.items()}
        received: dict[int, _Items] = {}
        if pool is not None and own in regions:
            received = {source: self._items(source, at, regions[own]) for source in pool.holders}
        return _MoveBefore(sent, received, ROUTINES[word].adds, self._holding(own, at + 1))


def _steps(task: str) -> list[tuple[str, str]]:
    """The word and the link or device of a task; of all-reduce those of two exchanges."""
    word, where = _parts(task)
    return [(step, where) for step in (("reducescatter", "allgather") if word == "allreduce" else (word,))]


def _parts(task: str) -> tuple[str, str]:
    word, _, where = task.partition(":")
    return word, where


def _pooled(holdings: dict[int, _Holding]) -> _Pool:
    """`holdings`: by rank. Those of a group are either one range, or parts of one that follow each other."""
    shards = [held.shard for held in holdings.values()]
    first, last = shards[0], shards[-1]
    if first == last:
        whole = first
    else:
        assert (first.whole, first.parts) == (last.whole, last.parts), "ranks of a group hold parts of different ranges"
        whole = first._replace(end=last.end)
        if whole.whole is not None and (whole.first, whole.end) == (0, whole.parts):
            whole = whole.whole
    return _Pool(
        tuple(holdings),
        whole,
        frozenset[int]().union(*(held.ranks for held in holdings.values())),
        any(held.coded for held in holdings.values()),
        any(held.partial for held in holdings.values()),
    )


class _Measure:
    """Finds the elements of shards in one piece."""

    def __init__(self, numel: int, cut: Cut) -> None:
        self._numel, self._cut = numel, cut
        self._runs: dict[_ShardRange, ParcelRun] = {}
        self._edges: dict[tuple[_ShardRange, int], Sequence[int]] = {}
        self._parcels: dict[_Unit, Parcel] = {}

    def edges_of(self, cuts: Sequence[tuple[_ShardRange, int]]) -> _Edges:
        for whole, parts in cuts:
            self._edges[whole, parts] = self._cut(*self._run(whole), parts)
        return tuple(tuple(self._edges[each]) for each in cuts)

    def leg(self, leg: _LegBefore) -> Leg:
        return Leg(None if leg.encode is None else self._encode(leg.encode), [self._move(move) for move in leg.moves], leg.decode)

    def _encode(self, encode: _EncodeBefore) -> Encode:
        run, parcels = self._run(encode.shard), self._items(encode.units)
        kept = frozenset(self._parcel(unit) for unit in encode.kept)
        made = tuple(parcel for parcel in parcels if isinstance(parcel, Parcel))
        return Encode(encode.number, encode.device, *run, made, kept.intersection(made), encode.voice, encode.ranks)

    def _move(self, move: _MoveBefore) -> ParcelMove:
        held = None if move.held is None else Held(*self._run(move.held.shard), move.held.ranks)
        sent = {target: self._items(items) for target, items in move.sent.items()}
        received = {source: self._items(items) for source, items in move.received.items()}
        return ParcelMove(sent, received, move.adds, held)

    def _items(self, items: _Items) -> tuple[Parcel, ...] | tuple[ParcelRun, ...]:
        """The items that have elements."""
        if not items or isinstance(items[0], _Unit):
            parcels = (self._parcel(unit) for unit in items if isinstance(unit, _Unit))
            return tuple(parcel for parcel in parcels if parcel.start < parcel.end)
        found = []
        for one, other in (overlap for overlap in items if isinstance(overlap, _Overlap)):
            start = max(self._run(one).start, self._run(other).start)
            end = min(self._run(one).end, self._run(other).end)
            if start < end:
                found.append(ParcelRun(start, end))
        return tuple(found)

    def _parcel(self, unit: _Unit) -> Parcel:
        if unit not in self._parcels:
            self._parcels[unit] = Parcel(unit.encode, unit.maker, *self._run(unit.shard), unit.ranks, unit.summed)
        return self._parcels[unit]

    def _run(self, shard: _ShardRange) -> ParcelRun:
        if shard.whole is None:
            return ParcelRun(0, self._numel)
        if shard not in self._runs:
            edges = self._edges[shard.whole, shard.parts]
            self._runs[shard] = ParcelRun(edges[shard.first], edges[shard.end])
        return self._runs[shard]
