"""Prices of a bucket's tasks on a cluster: microseconds, and bytes on the links."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from gradwire.core.checks import DTYPE_BYTES
from gradwire.core.cluster import Cluster
from gradwire.core.collectives import ALL_REDUCE, LINKS, collective_of
from gradwire.core.costs import Costs
from gradwire.core.plan import Bucket
from gradwire.core.profile import TensorProfile
from gradwire.core.specs import Identity, Spec
from gradwire.core.specs.base import ElementRun
from gradwire.core.tensors import TensorInfo
from gradwire.costs.codecs import CodecTimes, time_at
from gradwire.costs.steps import Step, steps_of

DECODE_CALLS = ("each", "one")
"""How a Decomp decodes several payloads of the same elements. each: one call for each payload, as the engine does. one: one
call for all their bytes; published codec times on GPUs seem to mean this."""


class Price(NamedTuple):
    """One task of one piece of a bucket."""

    task: str
    """word:where, as in the option; `launch:cpu` for the processor time of an exchange."""
    us: float
    gathers: bool
    """Whether it belongs to the gather phase."""
    sent_bytes: float = 0.0
    """Bytes that one rank sends."""
    intra_bytes: float = 0.0
    """Bytes over a rank's intra link."""
    inter_bytes: float = 0.0
    """Bytes over a node's inter link, of all its ranks together."""


class PricedBucket(NamedTuple):
    """A bucket's tasks, each of its pieces alike."""

    tasks: tuple[Price, ...]
    pieces: int
    """Chunks in which it is exchanged."""


class Prices:
    """Prices of buckets on one cluster; each bucket is priced once.

    tensors: all tensors of the model. routing: one of gradwire.costs.collectives.ROUTINGS. Shards are taken to be equal: the
    engine's rounding to blocks and alignment (under 200 bytes a shard) is not counted. decode_calls: one of DECODE_CALLS; a Comp
    is one call of its codec. launch_us: as in `Cluster`, a task before each exchange; 0 for none.

    >>> from gradwire.core import Link
    >>> cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    >>> prices = Prices([TensorInfo("w", (250,), "float32")], cluster, Costs(codecs=()))
    >>> bucket = Bucket(tensors=("w",), spec=Identity(), option=("allreduce:inter",))
    >>> [(price.task, price.us, price.sent_bytes) for price in prices.of(bucket).tasks]  # 2 alpha + 1000 bytes at 1 GB/s
    [('allreduce:inter', 21.0, 1000.0)]
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo | TensorProfile],
        cluster: Cluster,
        costs: Costs,
        routing: str = "ring",
        decode_calls: str = "each",
        launch_us: float = 0.0,
    ) -> None:
        self.launch_us = launch_us
        self.cluster, self.routing, self.decode_calls = cluster, routing, decode_calls
        self.codecs = CodecTimes(costs)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._known: dict[tuple[object, ...], PricedBucket] = {}

    def of(self, bucket: Bucket) -> PricedBucket:
        """The bucket's tasks with their prices. Raises PlanError for an option or codec that cannot be priced."""
        specs = bucket.spec if isinstance(bucket.spec, Spec) else bucket.specs
        key = (bucket.tensors, specs, bucket.option, bucket.chunk_bytes, bucket.reduce_dtype)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(bucket)
        return found

    def _price(self, bucket: Bucket) -> PricedBucket:
        rounds = bucket.spec_of(bucket.tensors[0]).rounds
        steps = steps_of(bucket.option, self.cluster.nodes, self.cluster.ranks_per_node, rounds, self.routing)
        tensors = [self._tensors[name] for name in bucket.tensors]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        coded = DTYPE_BYTES["float32"] * sum(tensor.numel for tensor in tensors)
        whole = bucket.option == ALL_REDUCE or not bucket.chunk_bytes
        pieces = 1 if whole else max(1, -(-nbytes // bucket.chunk_bytes))
        payloads = self._payload_bytes(bucket, nbytes, rounds)
        shares = self._shares(bucket, nbytes)
        tasks = []
        for step in steps:
            if step.traffic is None:
                # the encodes of several rounds are parts of one encode
                cuts = rounds if rounds and step.task.startswith("comp") else 1
                tasks.append(Price(step.task, self._codec_us(step, shares, coded / pieces) / cuts, step.gathers))
            else:
                if self.launch_us:
                    tasks.append(Price("launch:cpu", self.launch_us, step.gathers))
                tasks.append(self._exchange(step, payloads[step.payload] / pieces))
        return PricedBucket(tuple(tasks), pieces)

    def _payload_bytes(self, bucket: Bucket, nbytes: int, rounds: int) -> tuple[float, float, float]:
        """Of the whole bucket: gradients, payload of the first encode, of a later one, which encodes the sum."""
        if not any(task.startswith("comp") for task in bucket.option):
            return nbytes, 0.0, 0.0
        tensors = [self._tensors[name] for name in bucket.tensors]
        runs = [ElementRun(t.numel, bucket.spec_of(t.name).element_bits, t.shape) for t in tensors]
        spec = bucket.spec_of(tensors[0].name)
        first = spec.payload_bytes(runs, DTYPE_BYTES[tensors[0].dtype])
        if rounds:  # each round about as much; together exactly
            return nbytes, first / rounds, first / rounds
        return nbytes, first, spec.payload_bytes(runs, DTYPE_BYTES[bucket.reduce_dtype])

    def _shares(self, bucket: Bucket, nbytes: int) -> dict[Spec, float]:
        """The part of the bucket's bytes that each spec has."""
        if isinstance(bucket.spec, Spec):
            return {bucket.spec: 1.0}
        shares: dict[Spec, float] = {}
        for name, spec in bucket.spec.items():
            shares[spec] = shares.get(spec, 0.0) + self._tensors[name].nbytes / max(1, nbytes)
        return shares

    def _codec_us(self, step: Step, shares: Mapping[Spec, float], nbytes: float) -> float:
        """One call for all specs of the bucket: the time of the whole size by each spec, weighted with the spec's bytes.

        nbytes: of the gradients in float32.
        """
        what, _, device = step.task.partition(":")
        if not step.parts or not step.share:
            return 0.0  # one rank alone decodes no payload of others
        calls = 1 if self.decode_calls == "one" else step.parts
        size = nbytes * step.share * step.parts / calls
        curves = {spec: self.codecs.points(spec, device, "encode" if what == "comp" else "decode") for spec in shares}
        return calls * sum(share * time_at(curves[spec], size) for spec, share in shares.items())

    def _exchange(self, step: Step, nbytes: float) -> Price:
        assert step.traffic is not None
        intra, inter, sent = step.traffic
        held = nbytes * step.share * step.parts
        us = step.traffic.time_us(held, *self.cluster.links_for(step.task))
        return Price(step.task, us, step.gathers, sent * held, intra.factor * held, inter.factor * held)

    def uncompressed(self, bucket: Bucket) -> PricedBucket:
        """The same exchanges with uncompressed gradients, as in CD-SGD's correction step.

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
