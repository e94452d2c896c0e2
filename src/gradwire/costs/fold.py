"""Cupcake's affine costs, folded from an option, a spec and a cluster (docs/papers/cupcake.md)."""

import msgspec

from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import Bucket
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.costs.prices import Prices

_BETWEEN = (2**20, 64 * 2**20)
"""Bytes of gradient between which codec times are taken to be affine."""


class AffineCost(msgspec.Struct, frozen=True):
    """Microseconds for so many bytes of uncompressed gradient: a start and a rate.

    >>> AffineCost(30, us_per_byte=0.001)(2000)
    32.0
    """

    alpha_us: float
    us_per_byte: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha_us + self.us_per_byte * nbytes


def fold(
    option: tuple[str, ...],
    spec: Spec,
    cluster: Cluster,
    costs: Costs,
    *,
    routing: str = "ring",
    decode_calls: str = "each",
) -> tuple[AffineCost, AffineCost, AffineCost]:
    """The affine costs (encode, exchange, decode) of float32 buckets that one option synchronises.

    encode: Cupcake's h, all Comp tasks, and the Decomps that a later exchange waits for. exchange: Cupcake's g, all link tasks,
    one after the other; the spec's ratio, the scheme's factor and the number of ranks are in it. decode: the last Decomp, for
    all-gather of the payloads of all ranks. Exchanges are exact up to a payload's rounding. Codec times follow the line through
    the measured curve at 1 and 64 MiB. routing, decode_calls: as in `Prices`. Raises PlanError for what cannot be priced.

    >>> from gradwire.core import Link, Cast, CodecCosts
    >>> cluster = Cluster(nodes=4, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    >>> times = Costs(codecs=[CodecCosts(spec=Cast(), device="gpu", encode=[(0, 7.0)], decode=[(0, 2.0)])])
    >>> encode, exchange, decode = fold(("comp:gpu", "allgather:inter", "decomp:gpu"), Cast(), cluster, times)
    >>> exchange  # 3 alpha; of each byte of gradient half a byte goes to 3 ranks, at 0.001 us a byte
    AffineCost(alpha_us=30.0, us_per_byte=0.0015)
    >>> decode.alpha_us  # 4 payloads
    8.0
    """
    tensors = [TensorInfo(f"{nbytes} bytes", (nbytes // 4,), "float32") for nbytes in _BETWEEN]
    prices = Prices(tensors, cluster, costs, routing, decode_calls)
    small, large = (_times(prices, Bucket(tensors=(t.name,), spec=spec, option=option)) for t in tensors)
    betas = [(high - low) / (_BETWEEN[1] - _BETWEEN[0]) for low, high in zip(small, large, strict=True)]
    encode, exchange, decode = (
        AffineCost(low - beta * _BETWEEN[0], beta) for low, beta in zip(small, betas, strict=True)
    )
    return encode, exchange, decode


def _times(prices: Prices, bucket: Bucket) -> tuple[float, float, float]:
    """Encode, exchange and decode of a bucket."""
    tasks = prices.of(bucket).tasks
    exchange = sum(task.us for task in tasks if task.task.endswith(("intra", "inter")))
    decode = tasks[-1].us if tasks[-1].task.startswith("decomp") else 0.0
    return sum(task.us for task in tasks) - exchange - decode, exchange, decode
