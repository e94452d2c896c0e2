"""Chooses the compressor of each tensor where tensors are exchanged one after another and nothing computes meanwhile.

So it is under FSDP2 on the CPU, whose backward waits for the exchange of each module. No bucket hides another one, so the step
is shortest if the exchange of each tensor is.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from gradwire.auto.accuracy import specs_of, steps_for_one
from gradwire.auto.live import AllRanks
from gradwire.auto.measuring import CODECS_SECONDS, cluster_of, codecs_of
from gradwire.auto.planning import CLOSE
from gradwire.core import Cluster, Costs, Identity, Profile, Spec, TensorInfo, TensorProfile
from gradwire.plan import Policy
from gradwire.sim import Simulator, device_of, rules_of

_NEVER_US = 1e300
LINKS_SECONDS = 0.3
"""Time for measuring one kind of link."""


class ChosenSpecs(NamedTuple):
    """The compressors of tensors that are exchanged alone."""

    specs: dict[str, Spec]
    """The compressor of each tensor."""
    us: float
    """Predicted time of all exchanges of a step, one after another."""
    plain_us: float
    """Predicted time without compression."""
    module_us: Mapping[str, float] = MappingProxyType({})
    """Predicted time of the exchange of each tensor."""

    def __str__(self) -> str:
        """One line of text.

        >>> str(ChosenSpecs({"a": Identity(), "b": Identity()}, 2000.0, 2000.0))
        "plan='auto' sends 2 modules uncompressed: gradient exchanges take 2.0 ms a step by prediction, 2.0 ms uncompressed."
        """
        took = f"gradient exchanges take {self.us / 1e3:.1f} ms a step by prediction, {self.plain_us / 1e3:.1f} ms uncompressed."
        return f"plan='auto' sends {counted(self.specs)}: {took}"


def counted(specs: Mapping[str, Spec]) -> str:
    """Say how many modules have each compressor.

    >>> counted({"a": QSGD(bits=4), "b": Identity(), "c": QSGD(bits=4)})
    '2 modules with QSGD(bits=4, block=128), 1 module uncompressed'
    """
    counts: dict[str, int] = {}
    for spec in specs.values():
        name = f"with {spec!r}" if spec.encodes else "uncompressed"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} module{'s' * (count > 1)} {name}" for name, count in counts.items())


def choose_alone(ranks: AllRanks, tensors: Sequence[TensorInfo], accuracy: str | float, scheme: str | None = None) -> ChosenSpecs:
    """Return the compressor of each tensor with the shortest exchange. Measures links and compressors, for about a second at
    most. Collective: all ranks return the same. If rank 0 cannot choose, it logs why, and nothing is compressed.

    scheme: the scheme by which all tensors travel; None: as a policy chooses. Specs with weights of elements are left out: where
    ranks share processors they take longer than the prediction of an exchange alone knows (docs/experiments/frameworks.md).
    """
    cluster = cluster_of(ranks, LINKS_SECONDS)
    specs: list[Spec] = [Identity()]
    for spec in specs_of(accuracy, tensors, cluster.world_size):
        if (scheme is None or scheme in spec.schemes) and spec.element_weights is None:
            specs.append(spec)

    def make() -> str:
        costs = codecs_of(ranks, specs[1:], CODECS_SECONDS)
        return msgspec.json.encode([_us_of(each, specs, scheme, cluster, costs, ranks.device.type) for each in tensors]).decode()

    text = ranks.made_by_first(make, "gradients are sent uncompressed")
    rows = msgspec.json.decode(text, type=list[list[float]]) if text else [[0.0] for _ in tensors]
    # the most accurate one of those that are close to the best
    places = [next(place for place, us in enumerate(row) if us <= CLOSE * min(row)) for row in rows]
    chosen = {tensor.name: specs[place] for tensor, place in zip(tensors, places, strict=True)}
    each_us = {tensor.name: row[place] for tensor, row, place in zip(tensors, rows, places, strict=True)}
    return ChosenSpecs(chosen, sum(each_us.values()), sum(row[0] for row in rows), each_us)


def _us_of(
    tensor: TensorInfo, specs: Sequence[Spec], scheme: str | None, cluster: Cluster, costs: Costs, device: str
) -> list[float]:
    """Return the predicted microseconds of the tensor's exchange with each spec, for the progress of one step of DDP."""
    profiled = TensorProfile(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, backward_us=0.0, forward_us=0.0)
    profile = Profile(model="alone", batch=1, device=device, steps=1, optimizer_us=0.0, tensors=(profiled,))
    rules = msgspec.structs.replace(rules_of(device_of(profile), cluster), reports=False)
    simulator, us = Simulator(profile, cluster, costs, rules), []
    for spec in specs:
        if tensor.embedding and not spec.keeps_zeros:
            us.append(_NEVER_US)
            continue
        policy = Policy(default=spec, exempt_vectors=False, scheme=scheme)
        plan = policy.plan([tensor], cluster.world_size, cluster.ranks_per_node_if_even)
        us.append(simulator.step_us(plan) * steps_for_one([spec]))
    return us
