"""The time of one step with the tensors cut into given buckets, by Cupcake's timeline (section 4.1, equation 1).

One compute resource runs backward and encodes in series: it encodes a bucket as soon as the bucket's last gradient is ready,
before the backward of the next tensor. One link carries the exchanges in bucket order. The step begins with backward. It ends
with the last exchange, or, if decodes are exposed, with the decode of the last bucket.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from gradwire.costs import AffineCost

Cost: TypeAlias = Callable[[float], float]
"""Function from a bucket's bytes of uncompressed gradient to microseconds. A bucket of zero bytes still costs its start."""

Decoding: TypeAlias = Literal["exposed", "lumped"]


class FusionCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one bucket by its *uncompressed* bytes; the compression ratio and the scheme's factor are folded in.

    Each is a Cost, or a pair (alpha_us, us_per_byte), which becomes an AffineCost.

    >>> FusionCosts(encode=(100, 0), exchange=(30, 0.001)).exchange
    AffineCost(alpha_us=30, us_per_byte=0.001)
    """

    encode: Any
    """Cost of the encode, on the compute resource."""
    exchange: Any
    """Cost of the exchange, on the link."""
    decode: Any = AffineCost(0.0, 0.0)
    """Cost of the decode of all ranks' payloads together."""
    decoding: Decoding = "exposed"
    """exposed: decodes delay nothing else, and the step waits for the last bucket's decode only. lumped: decodes run on the
    compute resource together with the encode."""

    def __post_init__(self) -> None:
        for field in ("encode", "exchange", "decode"):
            if isinstance(cost := getattr(self, field), tuple):
                msgspec.structs.force_setattr(self, field, AffineCost(*cost))

    def of_compute(self, nbytes: float) -> float:
        """Microseconds of the compute resource for one bucket: the encode, and the decode if decodes are lumped."""
        encode_us: float = self.encode(nbytes)
        return encode_us + self.decode(nbytes) if self.decoding == "lumped" else encode_us

    def after(self, nbytes: float) -> float:
        """Microseconds from the last exchange to the end of the step, for a last bucket of `nbytes` bytes."""
        decode_us: float = self.decode(nbytes)
        return decode_us if self.decoding == "exposed" else 0.0


class Fusion(NamedTuple):
    """A partition of tensors into buckets, and its step."""

    boundaries: tuple[int, ...]
    """End of each bucket: bucket j holds the tensors boundaries[j-1] to boundaries[j] - 1, the first begins at 0."""
    step_us: float
    """Microseconds from the start of backward to the end of the last exchange, or of the exposed decode."""


Strategy: TypeAlias = Callable[[Sequence[float], Sequence[float], FusionCosts], tuple[int, ...]]
"""Function from (backward_us, nbytes, costs) to boundaries."""


def evaluate(boundaries: Sequence[int], backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> float:
    """Microseconds of the step, counted from the start of backward, when the tensors travel in these buckets.

    `backward_us` and `nbytes` are by tensor in gradient-ready order: the gap to the previous gradient, and the gradient's bytes.

    >>> costs = FusionCosts(encode=(1, 0), exchange=(2, 0.5))
    >>> evaluate([1, 3], backward_us=[10, 10, 10], nbytes=[4, 4, 4], costs=costs)
    38.0
    """
    return step_of(boundaries, prefix_sums(backward_us), prefix_sums(nbytes), costs)


def step_of(
    boundaries: Sequence[int],
    ready_us: Sequence[float],
    total_bytes: Sequence[float],
    costs: FusionCosts,
    limit_us: float = math.inf,
) -> float:
    """`evaluate` from prefix sums of times and sizes, for searches with many calls. Infinite above the limit."""
    encode, exchange, decode = costs.encode, costs.exchange, costs.decode
    lumped = costs.decoding == "lumped"
    codec_us = link_us = size = 0.0
    start = 0
    for end in boundaries:
        size = total_bytes[end] - total_bytes[start]
        codec_us += encode(size) + decode(size) if lumped else encode(size)
        ready = ready_us[end] + codec_us
        link_us = (ready if ready > link_us else link_us) + exchange(size)
        if link_us > limit_us:
            return math.inf
        start = end
    return link_us + costs.after(size)


def prefix_sums(values: Sequence[float]) -> list[float]:
    """The sums of the first 0, 1, 2, ... values: one more than there are values."""
    return list(accumulate(values, initial=0.0))
