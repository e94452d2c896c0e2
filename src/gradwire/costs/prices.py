"""Prices of a bucket's tasks on a cluster: microseconds, and bytes on the links. Times of codecs come from measured points.

The simulator and all searches take their times from here, launches included, and Cupcake's costs (docs/papers/cupcake.md)."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gradwire.core import (
    ALL_REDUCE,
    DTYPE_BYTES,
    LINKS,
    RAW,
    Bucket,
    Cluster,
    Costs,
    ElementRun,
    Identity,
    Points,
    Shaped,
    Spec,
    TensorInfo,
    collective_of,
    goes_around,
    least_ring_bytes,
    show,
)
from gradwire.costs.collectives import Line, longest, longest_us
from gradwire.costs.steps import Step, steps_of
from gradwire.errors import PlanError

DECODE_CALLS = ("engine", "each", "one")
"""The calls of a Decomp that decodes several payloads of the same elements. engine: one call for a sum with an own part on a GPU,
by specs that take batches; else one for each payload. each: one for each payload. one: one call for all bytes; published codec
times on GPUs seem to mean this."""
_SMALLEST_POWER, _LARGEST_POWER = 4, 17
"""Folded curves have a point at each of these powers of 4, in elements: from 1 KB to 17 GB."""
_LARGE = 64 * 2**20
"""Bytes of a large bucket."""


def time_at(points: Points, nbytes: float) -> float:
    """Microseconds at a size: linear between points, and along the last two points beyond them.

    Below the first point the time stays that of the first point: it is the time of a launch. A single point is a constant. Beyond
    the last point times never fall: if the last two points do, noise is the likelier reason.

    >>> points = ((1000, 10.0), (2000, 30.0))
    >>> time_at(points, 10), time_at(points, 1500), time_at(points, 3000)
    (10.0, 20.0, 50.0)
    """
    if nbytes <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right(points, nbytes, key=lambda point: point[0]), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    slope = (after - before) / (high - low)
    return before + slope * (nbytes - low) if nbytes <= high else after + max(0.0, slope) * (nbytes - high)


class Price(NamedTuple):
    """One task of one piece of a bucket."""

    task: str
    """word:where, as in the option; `launch:cpu` for the processor time of an exchange; `fetch:host` and `put:host` for the
    copies of a GPU's payloads to the host before an exchange, and back after it."""
    us: float
    gathers: bool
    """Whether it belongs to the gather phase."""
    sent_bytes: float = 0.0
    """Bytes that one rank sends."""
    intra_bytes: float = 0.0
    """Bytes over a rank's intra link, or over the intra link that all ranks of its node share."""
    inter_bytes: float = 0.0
    """Bytes of all ranks of a node over its inter link."""
    free_us: float = 0.0
    """The part of `us` in which the link is free for other exchanges: the latency of its messages."""
    cpu_us: float = 0.0
    """Processor time of the rank during an exchange."""


class Bytes(NamedTuple):
    """The sizes, in bytes, from which the times of a bucket's tasks follow."""

    raw: float
    """Bytes of the gradients."""
    first: float
    """Bytes of the payload of the first encode."""
    later: float
    """Bytes of the payload of a later encode, which encodes a sum."""
    coded: float
    """Bytes of the encoded gradients in float32: codec times are by these bytes."""


def bytes_of(
    tensors: Sequence[Shaped],
    spec: Spec,
    uncompressed: Sequence[Shaped] = (),
    bits: Mapping[str, int] | None = None,
    sum_dtype: str = "float32",
) -> Bytes:
    """The sizes of a bucket that holds `tensors` with `spec`, and `uncompressed` tensors in the same payload.

    bits: bits of an element by tensor, where they differ from the spec's. sum_dtype: dtype of the sum over ranks.
    """
    usual = spec.element_bits
    runs = [ElementRun(t.numel, usual if bits is None else bits[t.name], t.shape) for t in tensors]
    coded = DTYPE_BYTES["float32"] * sum(run.numel for run in runs)
    runs += [ElementRun(tensor.numel, RAW) for tensor in uncompressed]
    raw = sum(run.numel * DTYPE_BYTES[t.dtype] for run, t in zip(runs, (*tensors, *uncompressed), strict=True))
    first = spec.bytes_beside(runs, DTYPE_BYTES[(*tensors, *uncompressed)[0].dtype])
    if spec.rounds:  # each round about as much; together exactly
        return Bytes(raw, first / spec.rounds, first / spec.rounds, coded)
    return Bytes(raw, first, spec.bytes_beside(runs, DTYPE_BYTES[sum_dtype]), coded)


class PricedBucket(NamedTuple):
    """The tasks of each piece of a bucket; all pieces are alike."""

    tasks: tuple[Price, ...]
    pieces: int
    """Number of chunks in which the bucket is exchanged."""


class Prices:
    """Prices of buckets on one cluster; each bucket is priced once.

    tensors: all tensors of the model. routing: one of gradwire.costs.collectives.ROUTINGS. Shards are taken to be equal: the
    engine's rounding to blocks and alignment (under 200 bytes a shard) is not counted. decode_calls: one of DECODE_CALLS; a Comp
    is one call of its codec. launch_us: as in `Cluster`, the length of a task before each exchange; None: exchanges take no
    processor time. An all-reduce of gradients has its link's `cpu_us` in place of this task, if the link has one.

    >>> from gradwire.core import Link
    >>> cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    >>> prices = Prices([TensorInfo("w", (250,), "float32")], cluster, Costs(codecs=()))
    >>> bucket = Bucket(tensors=("w",), spec=Identity(), option=("allreduce:inter",))
    >>> [(price.task, price.us, price.sent_bytes) for price in prices.of(bucket).tasks]  # 2 alpha + 1000 bytes at 1 GB/s
    [('allreduce:inter', 21.0, 1000.0)]
    """

    def __init__(
        self,
        tensors: Sequence[Shaped],
        cluster: Cluster,
        costs: Costs,
        routing: str = "ring",
        decode_calls: str = "engine",
        launch_us: float | None = None,
    ) -> None:
        self.launch_us = launch_us
        self.cluster, self.routing, self.decode_calls = cluster, routing, decode_calls
        self.costs, self.codecs = costs, {(codec.spec, codec.device): codec for codec in costs.codecs}
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._known: dict[tuple[object, ...], PricedBucket] = {}
        # many options have the same step
        self._codec = cache(self._price_codec)
        self._exchange = cache(lambda step: cache(partial(self._price_exchange, step)))
        self._walk = cache(self._steps_and_exchanges)
        self.lines = cache(self._lines)
        """The lines of a step that is an exchange. The exchange takes as long as the longest line."""

    def of(self, bucket: Bucket) -> PricedBucket:
        """The bucket's tasks with their prices. Raises PlanError for an option or codec that cannot be priced."""
        specs = bucket.spec if isinstance(bucket.spec, Spec) else bucket.specs
        key = (bucket.tensors, specs, bucket.option, bucket.chunk_bytes, bucket.reduce_dtype)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(bucket)
        return found

    def _price(self, bucket: Bucket) -> PricedBucket:
        spec, bits = bucket.main_spec, {name: bucket.bits_of(name) for name in bucket.tensors}
        coded, uncompressed = ([self._tensors[n] for n in bits if (bits[n] == RAW) is raw] for raw in (False, True))
        whole = bytes_of(coded, spec, uncompressed, bits, bucket.reduce_dtype)
        uncut = bucket.option == ALL_REDUCE or not bucket.chunk_bytes
        pieces = 1 if uncut else max(1, -(-int(whole.raw) // bucket.chunk_bytes))
        size = Bytes(*(nbytes / pieces for nbytes in whole))
        return PricedBucket(self.tasks(bucket.option, spec.rounds, self._shares(bucket), size), pieces)

    def tasks(self, option: tuple[str, ...], rounds: int, shares: Mapping[Spec, float], size: Bytes) -> tuple[Price, ...]:
        """The tasks of one piece of a bucket.

        rounds: the spec's rounds. shares: the part of the compressed bytes that each spec has. size: the sizes of the piece.
        """
        tasks = []
        for step, exchange in self._walk(option, rounds):
            if exchange is None:
                tasks.append(self._codec(step, rounds, tuple(shares.items()), size.coded))
            else:
                if us := self._launch_us(step):
                    tasks.append(Price("launch:cpu", us, step.gathers))
                priced = exchange(size[step.payload])
                tasks += self._staged(step, priced, size[step.payload] * step.share * step.parts)
        first = next((at for at, task in enumerate(tasks) if task.task.startswith("comp")), None)
        if first is not None:
            tasks[first] = tasks[first]._replace(us=tasks[first].us + self._weigh_us(tasks[first].task, shares, size.coded))
        return tuple(tasks)

    def _weigh_us(self, comp: str, shares: Mapping[Spec, float], nbytes: float) -> float:
        """Microseconds that a rank weighs all elements of the piece, whatever part of them it encodes: for the first Comp."""
        device = comp.partition(":")[2]
        us = 0.0
        for spec, share in shares.items():
            codec = self.codecs.get((spec, device))
            if codec is not None and codec.weigh:
                us += share * time_at(codec.weigh, nbytes)
        return us * (self.cluster.ranks_per_processor if device == "cpu" else 1.0)

    def _staged(self, step: Step, exchange: Price, held_bytes: float) -> list[Price]:
        """An exchange with the copies before it and after it, if payloads travel through the host's memory.

        What goes to several ranks is copied to the host once. In a sum on the wire the whole is copied each way.
        """
        if self.cluster.staging_gbps is None:
            return [exchange]
        arriving = held_bytes if step.task.startswith("allreduce") else exchange.sent_bytes
        us = [nbytes / (125 * self.cluster.staging_gbps) for nbytes in (min(held_bytes, exchange.sent_bytes), arriving)]
        return [Price("fetch:host", us[0], step.gathers), exchange, Price("put:host", us[1], step.gathers)]

    def _steps_and_exchanges(self, option: tuple[str, ...], rounds: int) -> list[tuple[Step, Callable[[float], Price] | None]]:
        """The steps of an option, each exchange with the function that prices it by its bytes."""
        return [(step, self._exchange(step) if step.traffic else None) for step in self.steps(option, rounds)]

    def steps(self, option: tuple[str, ...], rounds: int) -> tuple[Step, ...]:
        """The steps of an option on this cluster; rounds: the spec's rounds."""
        return steps_of(option, self.cluster.nodes, self.cluster.ranks_per_node, rounds, self.routing)

    def forms(self, option: tuple[str, ...], rounds: int) -> list[tuple[Step, ...]]:
        """The steps of an option for small pieces, and for large pieces if their traffic differs."""
        steps = self.steps(option, rounds)
        small = tuple(step._replace(large=None) for step in steps)
        if small == steps:
            return [steps]
        return [small, tuple(step._replace(traffic=step.large or step.traffic, large=None) for step in steps)]

    def _launch_us(self, step: Step) -> float:
        """Processor time in microseconds before an exchange. A measured all-reduce has all its processor time in its own link."""
        if self.launch_us is None or (self._measured(step) and any(self._processor(step))):
            return 0.0
        return self.cluster.ranks_per_processor * self.launch_us

    def _processor(self, step: Step) -> tuple[float, float]:
        """A rank's processor time during an exchange: for its messages, and for each byte that the rank holds."""
        traffic, cluster = step.traffic, self.cluster
        if traffic is None or self.launch_us is None:
            return 0.0, 0.0
        if self._measured(step):
            link = cluster.allreduce
            return (0.0, 0.0) if link is None or step.payload else (link.cpu_us, link.cpu_us_per_byte)
        inside = traffic.intra.factor if traffic.inter.messages else traffic.sent
        start_us = traffic.intra.messages * cluster.intra.cpu_us + traffic.inter.messages * cluster.inter.cpu_us
        outside = max(0.0, traffic.sent - inside)
        return start_us, min(inside, traffic.sent) * cluster.intra.cpu_us_per_byte + outside * cluster.inter.cpu_us_per_byte

    def _measured(self, step: Step) -> bool:
        """Whether the step is an all-reduce whose link was measured by itself."""
        return self.cluster.allreduce is not None and step.task == ALL_REDUCE[0]

    def _shares(self, bucket: Bucket) -> dict[Spec, float]:
        """The part of the compressed bytes that each spec has."""
        if isinstance(bucket.spec, Spec):
            return {bucket.spec: 1.0}
        nbytes = {name: self._tensors[name].nbytes for name, spec in bucket.spec.items() if spec.encodes}
        shares: dict[Spec, float] = {}
        total = max(1, sum(nbytes.values()))
        for name, size in nbytes.items():
            shares[bucket.spec[name]] = shares.get(bucket.spec[name], 0.0) + size / total
        return shares

    def _price_codec(self, step: Step, rounds: int, shares: tuple[tuple[Spec, float], ...], nbytes: float) -> Price:
        # the encodes of several rounds are parts of one encode
        cuts = rounds if rounds and step.task.startswith("comp") else 1
        return Price(step.task, self._codec_us(step, shares, nbytes) / cuts, step.gathers)

    def _codec_us(self, step: Step, shares: tuple[tuple[Spec, float], ...], nbytes: float) -> float:
        """Microseconds of one call for all specs of the bucket: the whole size's time by each spec, weighted with its bytes.

        nbytes: bytes of the gradients in float32.
        """
        what, _, device = step.task.partition(":")
        if not step.parts or not step.share:
            return 0.0  # one rank alone decodes no payload of others
        us = 0.0
        for spec, share in shares:
            calls = self.calls(step, spec)
            points = self.points(spec, device, "encode" if what == "comp" else "decode")
            us += calls * share * time_at(points, nbytes * step.share * step.parts / calls)
        return us * (self.cluster.ranks_per_processor if device == "cpu" else 1.0)

    def calls(self, step: Step, spec: Spec) -> int:
        """The calls of a codec in a step that has elements."""
        together = step.sums and step.task.endswith(":gpu") and spec.batches and self.decode_calls == "engine"
        return 1 if together or self.decode_calls == "one" else step.parts

    def _lines(self, step: Step) -> tuple[Line, ...]:
        assert step.traffic is not None
        # the measured link between nodes has the time of stages inside nodes
        traffic = step.traffic._replace(in_turn=step.traffic.in_turn and not self._measured(step))
        return traffic.lines(*self.cluster.links_for(step.task))

    def exchange_us(self, step: Step, held_bytes: float) -> float:
        """Microseconds of a step that is an exchange, in which a rank holds `held_bytes` bytes."""
        return longest_us(self.lines(step), held_bytes)

    def _price_exchange(self, step: Step, nbytes: float) -> Price:
        traffic, (intra, _) = step.traffic, self.cluster.links_for(step.task)
        if step.large is not None and goes_around(nbytes, self.cluster.nodes, self.cluster.world_size):
            traffic = step.large
            step = step._replace(traffic=traffic)
        assert traffic is not None
        held = nbytes * step.share * step.parts
        inside, between = traffic.intra_factor(intra) * held, traffic.inter.factor * held
        us, free_us = longest(self.lines(step), held)
        start_us, us_per_byte = self._processor(step)
        cpu_us = self.cluster.ranks_per_processor * (start_us + us_per_byte * held)
        return Price(step.task, us, step.gathers, traffic.sent * held, inside, between, free_us, cpu_us)

    def points(self, spec: Spec, device: str, what: str) -> Points:
        """The measured points of a spec on a device; what: 'encode', 'decode' or 'weigh'. Raises PlanError if the costs have
        none of the spec there."""
        codec = self.codecs.get((spec, device))
        if codec is None:
            known = ", ".join(f"{show(codec.spec)} on {codec.device}" for codec in self.costs.codecs) or "none"
            raise PlanError(
                f"costs have no times of {spec!r} on {device}, so no step with this codec can be timed. They have: {known}. Time "
                "its encode and decode on that device at a small and a large size, and add an entry to codecs: "
                '{"spec": ..., "device": ..., "encode": [[bytes, microseconds], ...], "decode": [...]}.'
            )
        return {"encode": codec.encode, "decode": codec.decode, "weigh": codec.weigh}[what]

    def uncompressed(self, bucket: Bucket) -> PricedBucket:
        """The bucket's exchanges with uncompressed gradients, as in CD-SGD's correction step.

        An option that sums in several rounds sends the gradient once, so all rounds together cost one.
        """
        named = collective_of(bucket.option)
        option = tuple(task for task in bucket.option if task.partition(":")[2] in LINKS)
        if named is not None and named.own_words:
            option = named.uncompressed
        plain = msgspec.structs.replace(bucket, spec=Identity(), option=option)
        priced, rounds = self.of(plain), len(option) if {*option} == {*ALL_REDUCE} else 1
        tasks = tuple(Price(p.task, p.us / rounds, p.gathers, *(size / rounds for size in p[3:])) for p in priced.tasks)
        return priced._replace(tasks=tasks)


class AffineCost(msgspec.Struct, frozen=True):
    """Microseconds as a function of the bytes of uncompressed gradient: a start and a rate.

    >>> AffineCost(30, us_per_byte=0.001)(2000)
    32.0
    """

    alpha_us: float
    us_per_byte: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha_us + self.us_per_byte * nbytes


class CurveCost(msgspec.Struct, frozen=True, dict=True):
    """Microseconds as a function of the bytes of uncompressed gradient: linear between points, as `time_at`."""

    points: Points

    def __call__(self, nbytes: float) -> float:
        start, us, slope = self._pieces[bisect_right(self._sizes, nbytes)]
        return us + slope * (nbytes - start)

    @cached_property
    def _sizes(self) -> list[float]:
        return [nbytes for nbytes, _ in self.points]

    @cached_property
    def _pieces(self) -> list[tuple[float, float, float]]:
        """(bytes, microseconds there, microseconds per byte) of the piece below the first point, after it, and so on."""
        slopes = [(after - before) / (high - low) for (low, before), (high, after) in pairwise(self.points)]
        beyond = max(0.0, slopes[-1]) if slopes else 0.0
        starts = zip(self.points, [*slopes, beyond], strict=True)
        return [(*self.points[0], 0.0), *((nbytes, us, slope) for (nbytes, us), slope in starts)]

    def line(self, low: float, high: float) -> AffineCost:
        """The line through the times at two sizes, with no start or rate below 0."""
        at_low = self(low)
        beta = max(0.0, (self(high) - at_low) / (high - low))
        return AffineCost(max(0.0, at_low - beta * low), beta)


class FoldedCosts(NamedTuple):
    """Costs of float32 buckets as functions of their bytes of gradient."""

    encode: CurveCost
    """Cupcake's h: all Comp tasks, the processor time of exchanges, and the Decomps that a later exchange waits for."""
    exchange: CurveCost
    """Cupcake's g: all link tasks, one after the other. The spec's ratio and the scheme's factor are in it."""
    busiest: CurveCost
    """The tasks on the busier link of large buckets: other buckets can be on the other link meanwhile."""
    decode: CurveCost
    """The last Decomp, for all-gather of the payloads of all ranks."""


def fold(option: tuple[str, ...], spec: Spec, prices: Prices) -> FoldedCosts:
    """The costs of buckets of any size that one option synchronises, by these prices.

    The curves bend where the measured times of codecs do. Exchanges are exact up to a payload's rounding. Raises PlanError for
    an option or a codec that cannot be priced.

    >>> from gradwire.core import Link, Cast, CodecCosts
    >>> cluster = Cluster(nodes=4, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    >>> times = Costs(codecs=[CodecCosts(spec=Cast(), device="gpu", encode=[(0, 7.0)], decode=[(0, 2.0)])])
    >>> way = ("comp:gpu", "allgather:inter", "decomp:gpu")
    >>> folded = fold(way, Cast(), Prices([], cluster, times))
    >>> folded.exchange(2000)  # 3 alpha; of each byte of gradient half a byte goes to 3 ranks, at 0.001 us a byte
    33.0
    >>> folded.decode(2000)  # 4 payloads
    8.0
    """
    sizes = {4 * 4**power for power in range(_SMALLEST_POWER, _LARGEST_POWER)}
    for step in prices.steps(option, spec.rounds):
        what, _, device = step.task.partition(":")
        if step.traffic is None and step.share and step.parts:
            measured = prices.points(spec, device, "encode" if what == "comp" else "decode")
            per_byte = step.share * step.parts / prices.calls(step, spec)
            sizes |= {4 * round(nbytes / per_byte / 4) for nbytes, _ in measured}
            sizes |= {nbytes for nbytes, _ in prices.points(spec, device, "weigh")}
        if step.large is not None:
            share = bytes_of([TensorInfo("bucket", (_LARGE // 4,), "float32")], spec)[step.payload] / _LARGE
            at, element = (4 * math.ceil(nbytes / share / 4) for nbytes in (least_ring_bytes(prices.cluster.world_size), 4))
            sizes |= {at - element, at, at + element}
    rows = [(nbytes, *_times(prices, option, spec, nbytes)) for nbytes in sorted(sizes)]
    encode, intra, inter, decode = (tuple((row[0], row[place]) for row in rows) for place in range(1, 5))
    exchange = tuple((row[0], row[2] + row[3]) for row in rows)
    busiest = max(intra, inter, key=lambda points: time_at(points, _LARGE))
    return FoldedCosts(CurveCost(encode), CurveCost(exchange), CurveCost(busiest), CurveCost(decode))


def _times(prices: Prices, option: tuple[str, ...], spec: Spec, nbytes: int) -> tuple[float, float, float, float]:
    """Encode, exchanges on either link, and decode of a bucket."""
    size = bytes_of([TensorInfo("bucket", (nbytes // 4,), "float32")], spec)
    tasks = prices.tasks(option, spec.rounds, {spec: 1.0}, size)
    intra, inter = (sum(task.us for task in tasks if task.task.endswith(link)) for link in LINKS)
    decode = tasks[-1].us if tasks[-1].task.startswith("decomp") else 0.0
    return sum(task.us + task.cpu_us for task in tasks) - intra - inter - decode, intra, inter, decode
