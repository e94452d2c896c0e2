"""Whole plans by each method: a search starts from them, and other plans are compared with them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from gradwire.core.collectives import ALL_REDUCE
from gradwire.core.specs import Spec
from gradwire.costs.prices import fold
from gradwire.errors import PlanError
from gradwire.planner.drafts import Choice, Draft, Part, PlanningJob, numbered
from gradwire.planner.fusion import optimal
from gradwire.planner.offload import offload, on_cpu
from gradwire.planner.partition import FusionCosts, Strategy, check_tensors, evaluate
from gradwire.planner.policy import Policy
from gradwire.planner.schemes import carries
from gradwire.planner.select import by_own_times, select_options
from gradwire.sim.native import ReplayProgram
from gradwire.sim.replay import NEVER

_MIB = 2**20
_TRIED_BYTES = tuple(size * _MIB for size in (2, 4, 8, 16, 32, 64))
FEW = 32
"""With at most so many tensors ByteComp's selection is among the starts: each tensor takes a simulation or more."""
MOST = 1000
"""Up to so many products of counts the offload tries all; beyond that it uses coordinate descent."""


def sorted_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """In the order in which buckets become ready."""
    return tuple(sorted(parts, key=lambda part: part.tensors[-1]))


def fused(job: PlanningJob, strategy: Strategy, choice: Choice) -> Draft:
    """Cut each class by a strategy of fusion with Cupcake's affine costs; exempt classes get the first uncompressed choice."""
    parts, tensors = [], job.profile.tensors
    for places in job.classes(choice):
        own = choice if job.may(places, choice) else job.plain[0]
        ready = [0, *(place + 1 for place in places)]
        gaps = [sum(each.backward_us for each in tensors[start:end]) for start, end in pairwise(ready)]
        start = 0
        for end in strategy(gaps, [tensors[place].nbytes for place in places], _costs(job, own)):
            parts.append(Part(tuple(places[start:end]), own))
            start = end
    return Draft(sorted_parts(parts))


def fused_by(job: PlanningJob, strategy: Strategy) -> Draft:
    """As `fused`, with the one choice that is best for all buckets."""
    choices = job.choices()
    coded = [choice for choice in choices if choice.encodes]
    drafts = [fused(job, strategy, choice) for choice in coded or choices]
    # if all exceed the memory limit, return the smallest: the caller reports how much it needs
    return best_of(job, iter(drafts)) or min(drafts, key=job.extra_bytes)


def _costs(job: PlanningJob, choice: Choice) -> FusionCosts:
    rules, costs = job.rules, job.simulator.prices.costs
    folded = fold(
        choice.option, choice.spec, job.cluster, costs, routing=rules.routing, decode_calls=rules.decode_calls
    )
    encode, exchange, decode = ((max(0.0, line.alpha_us), max(0.0, line.us_per_byte)) for line in folded)
    return FusionCosts(encode=encode, exchange=exchange, decode=decode)


def _optimal(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    line = [(cost.alpha_us, cost.us_per_byte) for cost in (costs.encode, costs.exchange, costs.decode)]
    return optimal(backward_us, nbytes, line[0], line[1], line[2]).boundaries


def close_after(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    costs: FusionCosts,
    *,
    limits: Iterable[float] = _TRIED_BYTES,
) -> tuple[int, ...]:
    """Cupcake's bucket fusion: a bucket closes with the tensor that exceeds the limit. The best limit of 2, 4, ... 64 MB."""

    def boundaries(limit: float) -> tuple[int, ...]:
        ends, filled = [], 0.0
        for end, size in enumerate(nbytes, 1):
            filled += size
            if filled > limit or end == len(nbytes):
                ends.append(end)
                filled = 0.0
        return tuple(ends)

    return shortest(map(boundaries, limits), backward_us, nbytes, costs)


def close_before(
    backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts, *, limit: float = 5 * _MIB
) -> tuple[int, ...]:
    """A bucket closes before the tensor that would exceed the limit; a tensor larger than the limit is alone.

    5 MB is DeAR-FB; DDP's is 25, Horovod's 64.
    """
    check_tensors(backward_us, nbytes)
    ends, filled = [], 0.0
    for start, size in enumerate(nbytes):
        if start and filled + size > limit:
            ends.append(start)
            filled = 0.0
        filled += size
    return (*ends, len(nbytes))


def shortest(
    candidates: Iterable[tuple[int, ...]], backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts
) -> tuple[int, ...]:
    """The boundaries with the shortest step."""
    check_tensors(backward_us, nbytes)
    return min(candidates, key=lambda ends: evaluate(ends, backward_us, nbytes, costs))


FUSIONS: dict[str, Strategy] = {"fusion": _optimal, "bucket": close_after}
"""Methods that cut the tensors, by name."""


def ddp(job: PlanningJob) -> Draft:
    """Plain DDP: all-reduce in buckets of 25 MB, one after the other."""
    plain = next((choice for choice in job.plain if choice.option == ALL_REDUCE), job.plain[0])
    return fused(job, partial(close_before, limit=25 * _MIB), plain)._replace(skew=0)


class Moved(NamedTuple):
    """A draft after ByteComp's Algorithm 2."""

    draft: Draft
    way: str
    """How the offload was searched, in words."""


def bytecomp(job: PlanningJob, looks: int | None = None, most: int = MOST) -> Moved:
    """ByteComp's selection and offload, every tensor alone, with the first spec.

    looks, most: see `select_options` and `offload`. Raises PlanError if all tensors are to be compressed, and some must not.
    """
    restrict = job.limits.restrict
    choices = list(job.plain)
    if job.specs:
        choices += [Choice(job.specs[0], option) for option in job.coded[job.specs[0]]]
    exempt = [place for place in range(len(job.profile.tensors)) if job.is_exempt(place)]
    if restrict == "all-compressed":
        if exempt:
            cures = ["let all tensors be compressed (--all-tensors)", "search without restrict='all-compressed'"]
            raise PlanError(
                f"restrict is 'all-compressed', but {len(exempt)} tensors must stay uncompressed. {numbered(cures)}"
            )
        choices = choices[len(job.plain) :] or choices
    tensors = job.profile.tensors
    by_size: dict[tuple[object, ...], list[ReplayProgram]] = {}
    tables = []
    for place, tensor in enumerate(tensors):
        key = (tensor.shape, tensor.dtype, job.is_exempt(place))
        if key not in by_size:
            by_size[key] = job.programs((place,), choices[: len(job.plain)] if job.is_exempt(place) else choices)
        tables.append(by_size[key])
    if restrict == "myopic":
        chosen = by_own_times(tables)
    else:
        chosen = select_options(job.line, tables, [tensor.nbytes for tensor in tensors], looks=looks).chosen
    parts = [Part((place,), choices[index]) for place, index in enumerate(chosen)]
    return _offloaded(job, Draft(tuple(parts)), most)


def _offloaded(job: PlanningJob, draft: Draft, most: int) -> Moved:
    if not job.offloads:
        return Moved(draft, "Nothing is offloaded: codecs may run on one device only, or were timed on one only.")
    parts = draft.parts
    elsewhere = {}
    for place, part in enumerate(parts):
        spec, option = part.choice.spec, on_cpu(part.choice.option)
        if spec.encodes:
            if not carries(option, spec, job.rules.device):
                way = f"Nothing is offloaded: payloads of {spec!r} can only be encoded on the device of the gradients."
                return Moved(draft, way)
            elsewhere[place] = part._replace(choice=Choice(spec, option))
    moved = {place: job.program(part) for place, part in elsewhere.items()}
    groups = [(job.profile.tensors[place].nbytes, part.choice) for place, part in enumerate(parts)]
    found = offload(job.line, [job.program(part) for part in parts], moved, groups, most=most)
    way = "all products of counts" if found.exhaustive else "coordinate descent over groups, which may miss the best"
    return Moved(
        draft._replace(parts=tuple(elsewhere[p] if p in found.tensors else part for p, part in enumerate(parts))),
        f"Offloaded to CPUs: {len(found.tensors)} of {len(moved)} compressed tensors, searched by {way}; "
        f"{found.simulated} steps simulated.",
    )


def drafts_to_start_from(job: PlanningJob) -> Iterator[Draft]:
    """The plans that the joint planner compares first, in ascending order of planning time."""
    yield ddp(job)
    choices, infos = job.choices(6), job.profile.tensor_infos(job.rules.device)
    place = {info.name: index for index, info in enumerate(infos)}
    by_policy: dict[Spec, list[tuple[int, ...]]] = {}
    for choice in choices:
        for limit in (5, 8, 16, 32):
            yield fused(job, partial(close_before, limit=limit * _MIB), choice)
        if choice.spec not in by_policy:
            policy = Policy(default=choice.spec, exempt_vectors=job.limits.exempt_vectors)
            buckets = policy.plan(infos, job.cluster.world_size, job.cluster.ranks_per_node).buckets
            by_policy[choice.spec] = [tuple(place[name] for name in bucket.tensors) for bucket in buckets]
        parts = [Part(b, choice if job.may(b, choice) else job.plain[0]) for b in by_policy[choice.spec]]
        yield Draft(sorted_parts(parts))
    for choice in choices:
        yield fused(job, _optimal, choice)
    if len(job.profile.tensors) <= FEW:
        yield bytecomp(job, looks=1).draft


def best_of(job: PlanningJob, drafts: Iterator[Draft]) -> Draft | None:
    """The first draft with the shortest step; None if all exceed the limits."""
    best, step = None, NEVER
    for draft in drafts:
        found = job.step(draft, step - 1)
        if found is not None:
            best, step = draft, found
    return best
