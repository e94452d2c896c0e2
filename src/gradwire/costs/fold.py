"""Cupcake's affine costs, folded from an option, a spec and a cluster (docs/papers/cupcake.md)."""

from typing import NamedTuple

from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import Bucket
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.costs.prices import Prices

__all__ = ["Affine", "AffineCosts", "fold"]

MIB = 2**20


class Affine(NamedTuple):
    """A time that is affine in the bytes of a group's *unencoded* gradient; 0 for an empty group, not alpha."""

    alpha_us: float
    us_per_byte: float

    def time_us(self, nbytes: float) -> float:
        """Microseconds for a group of so many bytes of gradient."""
        return self.alpha_us + self.us_per_byte * nbytes if nbytes else 0.0


class AffineCosts(NamedTuple):
    """Cupcake's h and g, and what it leaves out: all per byte of unencoded gradient."""

    encode: Affine
    """h: all Comp tasks of the option, and the Decomps between its exchanges, since a later exchange waits for them."""
    exchange: Affine
    """g: all link tasks, one after the other. The spec's ratio, the scheme's factor and the number of ranks are in it."""
    decode: Affine
    """The last Decomp, which no exchange waits for. For all-gather it decodes the payloads of all ranks."""


def fold(
    option: tuple[str, ...],
    spec: Spec,
    cluster: Cluster,
    costs: Costs,
    *,
    dtype: str = "float32",
    routing: str = "ring",
    decode_calls: str = "each",
    between: tuple[int, int] = (MIB, 64 * MIB),
) -> AffineCosts:
    """The affine costs of groups that are synchronised by one option: exact for exchanges, up to a payload's rounding.

    routing, decode_calls: as in `Prices`. Codec times are the line through the measured curve at the two sizes of `between`, in
    bytes of gradient: give it the range of the groups in question. Raises PlanError for what cannot be priced.

    >>> from gradwire.core import Link, Cast, CodecCosts
    >>> cluster = Cluster(nodes=4, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    >>> times = Costs(codecs=[CodecCosts(spec=Cast(), device="gpu", encode=[(0, 7.0)], decode=[(0, 2.0)])])
    >>> folded = fold(("comp:gpu", "allgather:inter", "decomp:gpu"), Cast(), cluster, times)
    >>> folded.exchange  # 3 alpha; of each byte of gradient half a byte goes to 3 ranks, at 0.001 us a byte
    Affine(alpha_us=30.0, us_per_byte=0.0015)
    >>> folded.decode.alpha_us  # 4 payloads
    8.0
    """
    itemsize = TensorInfo("one", (1,), dtype).nbytes
    tensors = [TensorInfo(f"{nbytes} bytes", (nbytes // itemsize,), dtype) for nbytes in between]
    prices = Prices(tensors, cluster, costs, routing, decode_calls)
    small, large = (_times(prices, Bucket(tensors=(t.name,), spec=spec, option=option)) for t in tensors)
    lines = []
    for low, high in zip(small, large, strict=True):
        beta = (high - low) / (between[1] - between[0])
        lines.append(Affine(low - beta * between[0], beta))
    return AffineCosts(*lines)


def _times(prices: Prices, bucket: Bucket) -> tuple[float, float, float]:
    """Encode, exchange and decode of a bucket."""
    tasks = prices.of(bucket).tasks
    exchange = sum(task.us for task in tasks if task.task.endswith(("intra", "inter")))
    decode = tasks[-1].us if tasks[-1].task.startswith("decomp") else 0.0
    return sum(task.us for task in tasks) - exchange - decode, exchange, decode
