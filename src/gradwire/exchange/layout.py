"""The memory of a plan: the flat buffer of each bucket that has one, the place of each tensor, and the schemes that exchange it.

Everything is allocated once, before the first step. All ranks have the same buckets and places; they own different shards.
"""

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise

import torch

from gradwire.collectives import AllReduce, Energies, Piece, Route, Scheme
from gradwire.compressors import BesideCompressor, Compressor, Context, compressor_for, store_for
from gradwire.core import RESIDUAL_DTYPES, Bucket, Plan
from gradwire.errors import PlanError
from gradwire.exchange.options import scheme_of, works_apart
from gradwire.kernels import Addresses, Scattered, Segment, Segments, tensor_key
from gradwire.kernels import is_float as kernels_take
from gradwire.transport import Group, kind_of


@dataclass(eq=False)
class Slot:
    """Where one gradient lies."""

    name: str
    bucket: int
    offset: int
    """Elements from the start of the bucket."""
    view: torch.Tensor
    """The place itself, in the tensor's shape and strides. Without memory (device meta) where the bucket has no flat buffer."""
    device: torch.device
    owed: torch.Tensor | None = None
    """A residual of another plan, flat, where this plan keeps no residuals. It is added to each gradient until a step counts."""
    energy: torch.Tensor | None = None
    """Energies of another plan, flat, where elements have no weights in this plan. A later plan may take them up."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of the place's kind, its elements in the same order."""
        if (tensor.dtype, tensor.shape, tensor.stride()) == self._kind:
            return True
        if tensor.dtype is not self.view.dtype or tensor.shape != self.view.shape:
            return False
        shape = self.view.shape
        return _order(_place_strides(tensor), shape) == _order(self.view.stride(), shape)

    @cached_property
    def _kind(self) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
        return self.view.dtype, self.view.shape, self.view.stride()

    @property
    def apart(self) -> bool:
        """Whether the bucket has no flat buffer, and gradients are exchanged where they lie."""
        return self.view.is_meta

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is like that of the place."""
        own, place, shape = tensor.stride(), self.view.stride(), self.view.shape
        same_kind = tensor.dtype is self.view.dtype and tensor.shape == shape
        return same_kind and (own == place or _order(own, shape) == _order(place, shape))

    def empty(self) -> torch.Tensor:
        """A tensor like the place, with memory of its own."""
        return torch.empty_strided(self.view.shape, self.view.stride(), dtype=self.view.dtype, device=self.device)

    def in_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the tensor's elements, in row-major order, put into the order of the place. Flat, on the place's device."""
        values = values.to(self.device)
        if self.view.is_contiguous():
            return values.reshape(-1)
        placed = torch.empty_strided(self.view.shape, self.view.stride(), dtype=values.dtype, device=values.device)
        return placed.copy_(values.reshape(self.view.shape)).as_strided((values.numel(),), (1,))

    def by_element(self, memory: torch.Tensor) -> torch.Tensor:
        """Values in the order of the place, put into row-major order. Flat."""
        if self.view.is_contiguous():
            return memory
        return memory.contiguous().as_strided(self.view.shape, self.view.stride()).reshape(-1)

    def add_owed(self, gradient: torch.Tensor, factor: int) -> None:
        """Add the slot's residual, times `factor`, to the gradient in the slot, or to one with memory like the slot's."""
        if self.owed is not None:
            memory = gradient.as_strided((gradient.numel(),), (1,))
            memory.add_((self.owed * factor).to(memory.dtype))


_MOST_ENCODES = 4
"""The most encodes of any option: before both first steps and before both second ones."""
_STEPPED_TOGETHER = 128
"""Shards of the optimizer begin at multiples of so many elements of a tensor. A fused optimizer's kernel treats whole vectors
and the rest differently; cut so, it rounds each element as in the whole tensor."""


@dataclass
class BucketBuffers:
    """A bucket of the plan in memory."""

    index: int
    bucket: Bucket
    flat: torch.Tensor
    """Empty where gradients are exchanged where they lie."""
    slots: list[Slot]
    bounds: list[int]
    """Elements at which the chunks begin and end."""
    chunks: list[Scheme]
    energies: Energies | None = None
    """Energies of all elements, if elements have weights."""

    @property
    def aliases(self) -> list[torch.Tensor]:
        """All tensors of gradwire's own whose memory is the flat buffer's."""
        return [self.flat, *(slot.view for slot in self.slots), *(t for chunk in self.chunks for t in chunk.aliases)]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return self.bounds[-1]

    @cached_property
    def compressed(self) -> list[Slot]:
        names = {*self.bucket.compressed}
        return [slot for slot in self.slots if slot.name in names]

    def take_back(self, slot: Slot) -> None:
        """No rank uses the sum of this gradient: put the residuals that it contains back into the memory."""
        if not self.bucket.spec_of(slot.name).encodes:
            return  # the slot itself keeps them
        for (start, end), chunk in zip(pairwise(self.bounds), self.chunks, strict=True):
            low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
            if low < high:
                chunk.take_back(low - start, high - start)


def build_buckets(
    plan: Plan,
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    random: torch.Tensor,
    step: int,
    flats: Sequence[torch.Tensor] | None = None,
    addresses: Addresses | None = None,
) -> list[BucketBuffers]:
    """Allocate every bucket, as it is in this step. `random` is int64 of shape (buckets, 2 * encodes, 4), on the parameters'
    device: of each bucket the keys of its encodes, then those of what these store. `flats` are the flat buffers of buckets
    with the same tensors that are never at work at the same time; new ones if not given. With `addresses` of all tensors
    buckets have none where kernels can work on tensors where they lie.

    Raises PlanError for an option, dtype or device that this version cannot run, naming it.
    """
    if len(plan.shares) not in (0, group.world_size):
        raise PlanError(
            f"shares has the parts of {len(plan.shares)} ranks, and there are {group.world_size}. Plan for this number of ranks, "
            "or leave shares out."
        )
    shares = [plan.shares if bucket.is_direct else () for bucket in plan.buckets]
    with _no_collections():
        return [
            _build(
                *(index, bucket, plan.shards_optimizer, shares[index], parameters, group, random[index], step),
                flats[index] if flats is not None else None,
                addresses,
            )
            for index, bucket in enumerate(plan.buckets)
        ]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the garbage collector. What a plan of many ranks has is no garbage, and to search it again and again took a
    quarter of the time."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _build(
    index: int,
    bucket: Bucket,
    sharded: bool,
    parts: Sequence[int],
    parameters: Mapping[str, torch.Tensor],
    group: Group,
    random: torch.Tensor,
    step: int,
    given: torch.Tensor | None,
    addresses: Addresses | None,
) -> BucketBuffers:
    members = [parameters[name] for name in bucket.tensors]
    first = members[0]
    for name, member in zip(bucket.tensors, members, strict=True):
        if member.dtype != first.dtype or member.device != first.device:
            raise PlanError(
                f"bucket {index} mixes {bucket.tensors[0]!r} ({first.dtype} on {first.device}) and {name!r} "
                f"({member.dtype} on {member.device}). A bucket holds one class: put them in buckets of their own."
            )
    numels = [member.numel() for member in members]
    numel = sum(numels)
    codec = compressor_for(bucket.main_spec.at_step(step)).summing(1, group.world_size)
    if codec.spec.encodes and not all(spec.encodes for spec in bucket.specs):
        codec = BesideCompressor(codec)
    make = scheme_of(index, bucket, kind_of(first.device), sharded)
    _check(index, bucket, first, codec, all_reduce=make is None)
    apart = None
    if addresses is not None and given is None and not sharded and works_apart(bucket, codec, first):
        apart = Scattered(addresses, first.dtype, numel, 1.0 / group.world_size)
    flat = given
    if flat is None:
        flat = torch.zeros(numel if apart is None else 0, dtype=first.dtype, device=first.device)
    slots, at = [], 0
    for name, member in zip(bucket.tensors, members, strict=True):
        slots.append(Slot(name, index, at, _view(flat, at, member, apart is not None), first.device))
        at += member.numel()
    if make is None:
        whole = AllReduce(flat, group.grid)
        return BucketBuffers(index, bucket, flat, slots, [0, flat.numel()], [whole])
    count = -(-numel * flat.element_size() // bucket.chunk_bytes) if bucket.chunk_bytes else 1
    granularity = _STEPPED_TOGETHER if sharded else codec.spec.granularity or max(1, *numels)
    bounds = cut(numels, granularity, 0, numel, count)
    energies = Energies.zeros(numel, first.device, codec.spec.element_weights)
    rows = _Rows(bucket, members, granularity, step, None if energies is None else energies.weights)
    contexts = [Context(row) for row in random.unbind()]
    encodes = len(contexts) // 2
    chunks: list[Scheme] = []
    for start, end in pairwise(bounds):
        runs = _BucketRuns(rows, start, flat.device)
        piece = Piece(
            flat=flat[start:end],
            bounds=tuple(runs.cut(0, end - start, group.world_size, parts)),
            whole=runs.between(0, end - start),
            reduce_dtype=getattr(torch, bucket.reduce_dtype),
            contexts=contexts[:encodes],
            store_for=partial(store_for, bucket.residual_dtype),
            store_contexts=contexts[encodes:],
            runs=runs,
            batched=launches(first.device),
            apart=None if apart is None else apart[start:end],
            energies=None if energies is None else energies[start:end],
        )
        chunks.append(make(codec, piece, group, index))
    for chunk in chunks:
        if isinstance(chunk, Route):
            for encode, voice in chunk.voices.items():
                random[[encode, encodes + encode], 3] = voice
    return BucketBuffers(index, bucket, flat, slots, bounds, chunks, energies)


def launches(device: torch.device) -> bool:
    """Whether each call of a kernel is a launch, so that few calls are better."""
    return kind_of(device) != "cpu"


def random_streams(plan: Plan, rank: int, device: torch.device) -> torch.Tensor:
    """Keys of the random streams, int64 of shape (buckets, 8, 4): seed, step, encode, rank. Encodes 0 to 3 are those of a
    scheme, 4 to 7 are the roundings of residuals that these store narrow."""
    random = torch.zeros(len(plan.buckets), 2 * _MOST_ENCODES, 4, dtype=torch.int64, device=device)
    for index, bucket in enumerate(plan.buckets):
        random[index, :, 0] = bucket.main_spec.random_seed
    random[:, :, 2] = torch.arange(2 * _MOST_ENCODES)
    random[:, :, 3] = rank
    return random


def cut(numels: Sequence[int], granularity: int, start: int, end: int, parts: int, sizes: Sequence[int] = ()) -> list[int]:
    """parts + 1 edges that cut start..end of a bucket, each at a tensor's end or at a multiple of `granularity` from a tensor's
    start. Parts of tiny buckets may be empty.

    sizes: the size of each part in any unit; all are equal if left out.

    >>> cut([300, 1], granularity=128, start=0, end=301, parts=2)
    [0, 128, 301]
    >>> cut([100], granularity=1, start=0, end=100, parts=3, sizes=[2, 0, 3])
    [0, 40, 40, 100]
    """
    ends, tensors_end = [0, *accumulate(sizes or [1] * parts)], list(accumulate(numels))
    edges = [start]
    for part in range(1, parts):
        target = start + (end - start) * ends[part] // ends[-1]
        edges.append(max(edges[-1], min(end, _snap(numels, tensors_end, granularity, target))))
    return [*edges, end]


@lru_cache(maxsize=256)
def _known_cut(numels: tuple[int, ...], granularity: int, start: int, end: int, parts: int, sizes: tuple[int, ...]) -> list[int]:
    """`cut`, which pieces of equal tensors share."""
    return cut(numels, granularity, start, end, parts, sizes)


def _snap(numels: Sequence[int], ends: Sequence[int], granularity: int, target: int) -> int:
    """The allowed edge nearest to the target. `ends`: of the tensors with these elements."""
    if (at := bisect_left(ends, target)) == len(ends):
        return ends[-1] if ends else 0
    begin = ends[at] - numels[at]
    lower = (target - begin) // granularity * granularity
    upper = min(lower + granularity, numels[at])
    return begin + (lower if target - begin - lower <= upper - (target - begin) else upper)


class _Rows:
    """Makes the segments of any range of a bucket."""

    def __init__(
        self, bucket: Bucket, members: Sequence[torch.Tensor], granularity: int, step: int, weights: torch.Tensor | None
    ) -> None:
        """weights: of the bucket's elements."""
        self.numels, self.granularity, self._weights = tuple(member.numel() for member in members), granularity, weights
        self.tensors, at = [], 0
        for name, member in zip(bucket.tensors, members, strict=True):
            whole = Segment(at, member.numel(), tensor_key(name), 0, bucket.bits_of(name, step))
            self.tensors.append((whole, name, _shape_in_memory(member)))
            at += member.numel()
        self._ends = list(accumulate(self.numels))

    def between(self, start: int, end: int, device: torch.device) -> Segments:
        rows, names, shapes = [], [], []
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, end)
        for (at, numel, key, _, bits), name, shape in self.tensors[first : last + 1]:
            low, high = max(at, start), min(at + numel, end)
            if low < high:
                rows.append(Segment(low - start, high - low, key, low - at, bits))
                names.append(name)
                shapes.append(shape if high - low == numel else ())
        weights = None if self._weights is None else self._weights[start:end]
        return Segments(tuple(rows), device, tuple(names), tuple(shapes), weights)


@dataclass(frozen=True)
class _BucketRuns:
    """Cuts the piece that begins at an element of the bucket."""

    rows: _Rows
    begin: int
    device: torch.device

    def cut(self, start: int, end: int, parts: int, sizes: Sequence[int] = ()) -> list[int]:
        rows, begin = self.rows, self.begin
        edges = _known_cut(rows.numels, rows.granularity, begin + start, begin + end, parts, tuple(sizes))
        return [edge - begin for edge in edges]

    def between(self, start: int, end: int) -> Segments:
        return self.rows.between(self.begin + start, self.begin + end, self.device)


def _check(index: int, bucket: Bucket, first: torch.Tensor, codec: Compressor, all_reduce: bool) -> None:
    if bucket.main_spec.encodes and not kernels_take(first.dtype):
        raise PlanError(
            f"bucket {index} gives {codec.spec!r} to {bucket.tensors[0]!r}, whose gradient is {first.dtype}. Kernels take "
            "float32, bfloat16 and float16: add a rule with gw.Identity() for this tensor."
        )
    own, plain = str(first.dtype).removeprefix("torch."), not bucket.main_spec.encodes
    if all_reduce or (plain and own == "float64"):
        possible, why = [own], "all-reduce adds in the tensor's own dtype, and exact sums keep float64"
    else:
        possible, why = ["float32", *([own] if plain else [])], "decoded values are added in float32"
    if bucket.reduce_dtype not in possible:
        raise PlanError(
            f"bucket {index} of {own} tensors has reduce_dtype {bucket.reduce_dtype!r}, but {why}. Write "
            f"{' or '.join(dict.fromkeys(possible))}."
        )
    keeps = RESIDUAL_DTYPES if codec.spec.feedback else ("float32",)
    if bucket.residual_dtype not in keeps:
        why = "residuals are stored as one of these" if codec.spec.feedback else "nothing of what it sends is carried on"
        raise PlanError(
            f"bucket {index} with spec {bucket.main_spec!r} has residual_dtype {bucket.residual_dtype!r}, but {why}. Write "
            f"{' or '.join(keeps)}."
        )


def _view(flat: torch.Tensor, at: int, tensor: torch.Tensor, apart: bool) -> torch.Tensor:
    """The tensor's place."""
    if apart:
        return torch.empty_strided(tensor.shape, _place_strides(tensor), dtype=tensor.dtype, device="meta")
    part = flat[at : at + tensor.numel()]
    return part.as_strided(tensor.shape, _place_strides(tensor), part.storage_offset())


def _place_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own where these leave no holes (as in channels_last), else those of a contiguous tensor."""
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense, expected = True, 1
    for stride, size in strides:
        dense, expected = dense and stride == expected, expected * size
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


def _shape_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions in the order in which the elements lie. Dimensions of one element stay where they are."""
    strides = _place_strides(tensor)
    order = iter(sorted((at for at, size in enumerate(tensor.shape) if size > 1), key=lambda at: -strides[at]))
    return tuple(tensor.shape[next(order)] if size > 1 else size for size in tensor.shape)


def _order(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The strides of the dimensions of more than one element: the others do not matter."""
    return [stride for stride, size in zip(strides, shape, strict=True) if size > 1]
