"""The rivals of the best fusion, tuned as their authors tuned them (docs/papers/cupcake.md, docs/papers/dear.md).

Each is a `Strategy`: (backward_us, nbytes, costs) to boundaries. What else a rule depends on is a keyword with the published
value. `compare` runs all of them. MB is 2^20 bytes of uncompressed gradient.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate, groupby

from gradwire.costs.prices import AffineCost
from gradwire.errors import PlanError
from gradwire.planner.partition import Fusion, FusionCosts, Strategy, evaluate, prefix_sums
from gradwire.planner.starts import close_after, close_before, even_split, layer_wise

__all__ = ["STRATEGIES", "compare", "even_split", "hipress", "layer_names", "layer_wise", "mg_wfbp", "nearby_layers"]

_MB = 2**20


def nearby_layers(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    costs: FusionCosts,
    *,
    layers: Sequence[Hashable] | None = None,
    together: int = 4,
) -> tuple[int, ...]:
    """DeAR-NL: so many consecutive layers in each bucket.

    `layers` names the layer of each tensor, as `layer_names` does; None takes every tensor for a layer of its own.
    """
    layers = range(len(nbytes)) if layers is None else layers
    if len(layers) != len(nbytes):
        raise PlanError(
            f"layers has {len(layers)} entries for {len(nbytes)} tensors: each tensor is of one layer. Give one name for each."
        )
    ends, end = [], 0
    for number, (_, members) in enumerate(groupby(layers), 1):
        end += len(list(members))
        if number % together == 0 or end == len(nbytes):
            ends.append(end)
    return tuple(ends)


def layer_names(names: Iterable[str]) -> list[str]:
    """The layer of each tensor: the module whose own parameter it is.

    >>> layer_names(["layer4.2.bn3.weight", "layer4.2.bn3.bias", "scale"])
    ['layer4.2.bn3', 'layer4.2.bn3', '']
    """
    return [name.rpartition(".")[0] for name in names]


def mg_wfbp(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    """MG-WFBP as DeAR describes it: a tensor joins the bucket before it if that saves more than the bucket waits for it.

    What it saves is the constants, of the exchange and, with compression, of the encode; what it costs is that the bucket's
    exchange begins later, if the link is free before. One walk over the tensors, which sees no further than the next one.
    """
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    ends: list[int] = []
    start, codec_us, link_us = 0, 0.0, 0.0
    for end in range(1, len(nbytes)):
        size, added = total_bytes[end] - total_bytes[start], nbytes[end]
        alone_us = max(link_us, ready_us[end] + codec_us + costs.of_compute(size))
        merged_us = max(link_us, ready_us[end + 1] + codec_us + costs.of_compute(size + added))
        saved_us = sum(cost(size) + cost(added) - cost(size + added) for cost in (costs.of_compute, costs.exchange))
        if merged_us - alone_us >= saved_us:
            ends.append(end)
            codec_us += costs.of_compute(size)
            link_us = alone_us + costs.exchange(size)
            start = end
    return (*ends, len(nbytes))


def hipress(
    backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts, plain: AffineCost
) -> tuple[list[bool], Fusion]:
    """HiPress: every tensor alone, and compressed if it is exchanged sooner with compression on an idle machine.

    plain: the exchange of an uncompressed tensor. Returns which tensors are compressed, and the step.
    """
    compressed = [costs.encode(size) + costs.exchange(size) + costs.decode(size) < plain(size) for size in nbytes]
    codec_us = link_us = after_us = 0.0
    for ready_us, size, encodes in zip(accumulate(backward_us), nbytes, compressed, strict=True):
        codec_us += costs.of_compute(size) if encodes else 0.0
        link_us = max(link_us, ready_us + codec_us) + (costs.exchange(size) if encodes else plain(size))
        after_us = costs.after(size) if encodes else 0.0
    return compressed, Fusion(tuple(range(1, len(nbytes) + 1)), link_us + after_us)


STRATEGIES: dict[str, Strategy] = {
    "layer-wise": layer_wise,
    "close-after, best of 2 to 64 MB": close_after,
    "close-before, 5 MB (DeAR-FB)": close_before,
    "close-before, 25 MB (DDP)": partial(close_before, limit=25 * _MB),
    "close-before, 64 MB (Horovod)": partial(close_before, limit=64 * _MB),
    "even split, best of 2 to 32": even_split,
    "nearby layers, 4": nearby_layers,
    "MG-WFBP": mg_wfbp,
}
"""All rules that compress every bucket, by name."""


def compare(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    costs: FusionCosts,
    layers: Sequence[Hashable] | None = None,
    plain: AffineCost | None = None,
) -> dict[str, Fusion]:
    """The plan of each rule for these tensors. HiPress alone leaves tensors uncompressed, so it needs `plain`.

    `layers` as in `nearby_layers`, `plain` as in `hipress`.
    """
    strategies = STRATEGIES | {"nearby layers, 4": partial(nearby_layers, layers=layers)}
    found = {}
    for name, strategy in strategies.items():
        boundaries = strategy(backward_us, nbytes, costs)
        found[name] = Fusion(boundaries, evaluate(boundaries, backward_us, nbytes, costs))
    if plain is not None:
        found["HiPress"] = hipress(backward_us, nbytes, costs, plain)[1]
    return found
