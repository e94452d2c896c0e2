"""Measures each scheme on one bucket, flat and hierarchical, by size, and compares it with the model's prediction.

`python -m benchmarks schemes`. The links and the codec are fitted before, from exchanges and sizes that are not among the cells.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec

from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import Plan
from gradwire.core.profile import Profile, TensorProfile
from gradwire.core.provenance import Made
from gradwire.core.specs import QSGD, Identity, Spec
from gradwire.core.strict import Document
from gradwire.sim.rules import rules_of
from gradwire.sim.simulator import Simulator

__all__ = [
    "BITS", "SCHEMES", "Exchange", "Scheme", "SchemesRecord", "SchemesRun", "SchemesWork", "predicted_us",
    "repeats_for",
]  # fmt: skip

BITS = QSGD(bits=4)


class Scheme(NamedTuple):
    """A way to synchronise a bucket, as one group of all ranks and with nodes apart."""

    name: str
    spec: Spec
    flat: str
    """Tasks, with spaces between."""
    hierarchical: str = ""
    """'' where there is none."""


def _inside(tasks: str) -> str:
    """Sums inside the nodes around an exchange between them."""
    return f"reducescatter:intra {tasks} allgather:intra"


_TWO_PHASE = "comp:cpu alltoall:inter decomp:cpu comp:cpu allgather:inter decomp:cpu"
_ROOTED = "comp:cpu gather:inter decomp:cpu comp:cpu broadcast:inter decomp:cpu"
_GATHERED = "comp:cpu allgather:inter decomp:cpu"

SCHEMES = (
    Scheme("all-reduce", Identity(), "allreduce:inter", _inside("allreduce:inter")),
    Scheme(
        "reduce-scatter, all-gather",
        Identity(),
        "reducescatter:inter allgather:inter",
        _inside("reducescatter:inter allgather:inter"),
    ),
    Scheme(
        "reduce, broadcast",
        Identity(),
        "reduce:inter broadcast:inter",
        "reduce:intra reduce:inter broadcast:inter broadcast:intra",
    ),
    Scheme("4 bits: all-to-all, all-gather", BITS, _TWO_PHASE, _inside(_TWO_PHASE)),
    Scheme("4 bits: all-gather", BITS, _GATHERED, _inside(_GATHERED)),
    Scheme("4 bits: gather, broadcast", BITS, _ROOTED, _inside(_ROOTED)),
    Scheme("4 bits: ring", BITS, "comp:cpu reducescatter:inter allgather:inter decomp:cpu"),
    Scheme("4 bits: tree", BITS, "comp:cpu reduce:inter broadcast:inter decomp:cpu"),
)


class SchemesWork(Document, frozen=True, kw_only=True):
    """The measurements that the ranks make."""

    what: ClassVar[str] = "order to the ranks that measure schemes"

    nbytes: tuple[int, ...]
    repeats: tuple[int, ...]
    """Number of repeats for each size."""
    rounds: int
    """Times that every option has its turn; `repeats` are made in each."""
    collective_timeout_s: float
    runner: int
    """The process id of who gave the order. When it dies, so do the ranks."""
    result: str
    """File for the `SchemesRecord`, which rank 0 writes."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scheme at one size."""

    scheme: str
    hierarchical: bool
    nbytes: int
    """Bytes of gradient in the bucket."""
    us: tuple[float, ...]
    """Time of each repeat on the slowest rank: from the moment when the bucket is ready to the moment when its mean is
    back."""
    inter_bytes: int
    """Bytes that a node means to send to others, of all its ranks; of the node that sends most."""
    counted_bytes: int
    """Median of the bytes that the node's interface sent."""
    plan: Plan


class SchemesRecord(Document, frozen=True, kw_only=True):
    """The measurements of the ranks."""

    what: ClassVar[str] = "record of measured schemes"

    cluster: Cluster
    """The links, fitted before."""
    costs: Costs
    """The codec's times."""
    problems: tuple[str, ...]
    """Weaknesses of the fits, in words."""
    start_us: float = 0.0
    """Time of a bucket besides its exchanges and codec tasks: from the hook to a lane, and back to backward. It is
    measured first, with buckets smaller than those of all cells."""
    exchanges: tuple[Exchange, ...]

    def predicted_us(self, exchange: Exchange) -> float:
        """Predict one of the exchanges from the measurements before them."""
        return predicted_us(exchange, self.cluster, self.costs) + self.start_us


class SchemesRun(Document, frozen=True, kw_only=True):
    """The measurements over one link, and the numbers that predict them."""

    what: ClassVar[str] = "run of schemes"

    version: int = 1
    made: Made
    link: str
    """The rate between nodes that was emulated."""
    measured: SchemesRecord


def predicted_us(exchange: Exchange, cluster: Cluster, costs: Costs) -> float:
    """Predict the exchange by the model of a step on CPUs: one bucket that is ready at once.

    Raises PlanError for a codec that `costs` lack.
    """
    bucket = exchange.plan.buckets[0]
    tensor = TensorProfile(name=bucket.tensors[0], shape=(exchange.nbytes // 4,), dtype="float32", backward_us=0.0)
    profile = Profile(model="one bucket", batch=1, device="cpu", tensors=(tensor,))
    return Simulator(profile, cluster, costs, rules_of("cpu", cluster)).step_us(exchange.plan)


def repeats_for(nbytes: Sequence[int]) -> tuple[int, ...]:
    """Fewer of what takes longer."""
    return tuple(max(2, min(10, (16 << 20) // size)) for size in nbytes)
