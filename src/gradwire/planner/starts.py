"""Whole plans by each method: a search starts from them, and other plans are compared with them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product

from gradwire.core import ALL_REDUCE, LINKS, Spec
from gradwire.costs import CurveCost
from gradwire.plan import DEVICES, RESTRICTED, carries, tasks_of
from gradwire.planner.drafts import Choice, Draft, Part, PlanningJob
from gradwire.planner.fusion import optimal
from gradwire.planner.offload import on_cpu
from gradwire.planner.pareto import improved
from gradwire.planner.partition import Fusion, FusionCosts, Strategy, evaluate, prefix_sums, step_of
from gradwire.sim import NEVER

_MIB = 2**20
_BETWEEN = ((_MIB, 64 * _MIB), (_MIB // 16, 4 * _MIB))
"""Sizes in bytes between which lines approximate the cost curves: one pair for large buckets, one for small buckets."""
_RETRIED = 4
"""Number of choices for which fusion tries all approximations of the costs."""
_TRIED_BYTES = tuple(size * _MIB for size in (2, 4, 8, 16, 32, 64))


def sorted_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Sort parts into the order in which their buckets become ready."""
    return tuple(sorted(parts, key=lambda part: part.tensors[-1]))


def fused(job: PlanningJob, strategy: Strategy, choice: Choice) -> Draft:
    """Cut each class by a strategy of fusion with the choice's costs; exempt classes get the first uncompressed choice."""
    return _cut(job, strategy, choice, strategy)


def _cut(
    job: PlanningJob, strategy: Strategy, choice: Choice, others: Strategy, busiest: bool = False, exposed: bool = False
) -> Draft:
    """Cut as `fused` does. others: for all classes but the largest. busiest, exposed: as in `PlanningJob.fusion_costs`."""
    parts, classes = [], job.classes(choice.spec)
    largest = max(classes, key=lambda each: sum(each.nbytes))
    for each in classes:
        own = choice if job.may(each.places, choice) else job.plain[0]
        start, cut = 0, strategy if each is largest else others
        for end in cut(each.gaps_us, each.nbytes, job.fusion_costs(own, busiest, exposed)):
            parts.append(Part(tuple(each.places[start:end]), own))
            start = end
    return Draft(sorted_parts(parts))


def fused_by(job: PlanningJob, strategy: Strategy) -> Draft:
    """Cut as `fused` does, with the one choice that is best for all buckets."""
    drafts = [fused(job, strategy, choice) for choice in _for_all(job)]
    # if all exceed the memory limit, return the smallest: the caller reports how much it needs
    return best_of(job, iter(drafts)) or min(drafts, key=job.extra_bytes)


def _for_all(job: PlanningJob) -> list[Choice]:
    """The choices that all buckets may have."""
    choices = job.choices()
    return [choice for choice in choices if choice.encodes] or choices


def fusion(job: PlanningJob) -> Draft:
    """Solve Cupcake's problem with the choice that is best for all buckets, first with linear costs, then with measured curves.

    Cupcake assumes one link, and decodes that delay nothing else. So the search tries several approximations: the exchanges on
    two links run one after the other, or take as long as the busiest link; decodes are part of the encodes, or are exposed. The
    simulator selects the best plan. Tensors of other classes share the links, so as few buckets as possible hold them.
    """
    choices = _for_all(job)
    drafts = {_fuse(job, by_lines, choice): (choice, False, False) for choice in choices}
    steps = {draft: step for draft in drafts if (step := job.step(draft)) is not None}
    for choice, _, _ in [drafts[draft] for draft in sorted(steps, key=lambda draft: steps[draft])[:_RETRIED]]:
        two_links = {task.partition(":")[2] for task in choice.option} >= {*LINKS}
        lumped = job.fusion_costs(choice).decoding == "lumped" and choice.encodes
        for busiest, exposed in list(product((False, True)[: 1 + two_links], (False, True)[: 1 + lumped]))[1:]:
            drafts.setdefault(_fuse(job, by_lines, choice, busiest, exposed), (choice, busiest, exposed))
    best = best_of(job, iter(drafts)) or min(drafts, key=job.extra_bytes)
    return best_of(job, iter([best, _fuse(job, by_curves, *drafts[best])])) or best


def _fuse(job: PlanningJob, strategy: Strategy, choice: Choice, busiest: bool = False, exposed: bool = False) -> Draft:
    return _cut(job, strategy, choice, partial(close_before, limit=64 * _MIB), busiest, exposed)


def by_lines(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    """The best of several partitions. Each is exact for a linear approximation of the costs; the costs themselves select one."""
    found = {}
    for low, high in _BETWEEN:
        along = along_lines(costs, low, high)
        lines = along.encode, along.exchange, along.decode
        if lines not in found:
            found[lines] = optimal(backward_us, nbytes, *lines, costs.decoding).boundaries
    return shortest(found.values(), backward_us, nbytes, costs)


def along_lines(costs: FusionCosts, low: float = _MIB, high: float = 64 * _MIB) -> FusionCosts:
    """The costs as lines through the times at two sizes, with no start or rate below 0."""
    lines = [
        cost.line(low, high) if isinstance(cost, CurveCost) else cost for cost in (costs.encode, costs.exchange, costs.decode)
    ]
    return FusionCosts(encode=lines[0], exchange=lines[1], decode=lines[2], decoding=costs.decoding)


def by_curves(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    """The best fusion for costs of any shape that `gradwire.planner.pareto` finds; at least as good as `by_lines`."""
    ends = by_lines(backward_us, nbytes, costs)
    known = Fusion(ends, evaluate(ends, backward_us, nbytes, costs))
    return improved(backward_us, nbytes, costs, known)[0].boundaries


def close_after(
    backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts, *, limits: Iterable[float] = _TRIED_BYTES
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

    DeAR-FB has 5 MB, DDP 25 MB, Horovod 64 MB.
    """
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
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    best: tuple[int, ...] = ()
    least_us = math.inf
    for ends in dict.fromkeys(candidates):
        step_us = step_of(ends, ready_us, total_bytes, costs, least_us)
        if not best or step_us < least_us:
            best, least_us = ends, step_us
    return best


def layer_wise(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    """Every tensor alone, as GRACE and wait-free backpropagation do.

    >>> layer_wise([1, 1, 1], [4, 4, 4], FusionCosts(encode=(1, 0), exchange=(1, 0)))
    (1, 2, 3)
    """
    return tuple(range(1, len(nbytes) + 1))


def even_split(
    backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts, *, groups: Iterable[int] = range(2, 33)
) -> tuple[int, ...]:
    """Cupcake's even split: buckets whose numbers of tensors differ by at most one. The best of 2 to 32 buckets."""
    tensors = len(nbytes)

    def boundaries(count: int) -> tuple[int, ...]:
        count = min(count, tensors)
        return tuple(tensors * number // count for number in range(1, count + 1))

    return shortest(map(boundaries, groups), backward_us, nbytes, costs)


def ddp_draft(job: PlanningJob) -> Draft:
    """Plain DDP: all-reduce in buckets of 25 MB, one after the other."""
    plain = next((choice for choice in job.plain if choice.option == ALL_REDUCE), job.plain[0])
    return fused(job, partial(close_before, limit=25 * _MIB), plain)._replace(skew=0)


def by_own_tasks(job: PlanningJob, choices: Sequence[Choice]) -> Draft:
    """Every tensor alone, and compressed if its own tasks then take less: HiPress's rule (docs/papers/cupcake.md)."""
    parts = []
    for place in range(len(job.profile.tensors)):
        allowed = [choice for choice in choices if job.may([place], choice)]
        parts.append(min((Part((place,), choice) for choice in allowed), key=lambda part: sum(job.program(part).busy)))
    return Draft(tuple(parts))


def hipress(job: PlanningJob) -> Draft:
    """HiPress's rule. If nodes have several ranks, only exchanges between nodes are compressed."""
    published = [o.tasks for name in ("inter-allgather", "inter-alltoall") for o in job.options if RESTRICTED[name](o)]
    flat = [] if 1 < job.cluster.nodes < job.cluster.world_size else _flat(job, "allgather", "alltoall")
    choices = [Choice(spec, tasks) for spec in job.specs for tasks in job.coded[spec] if tasks in (*published, *flat)]
    return by_own_tasks(job, [*job.plain, *choices])


def grace(job: PlanningJob) -> Draft:
    """GRACE: every tensor alone and compressed, all ranks as one group: all-gather, or all-reduce of payloads that can be added.

    Among several specs the best is taken. If no spec can travel by these collectives, nothing is compressed.
    """
    return _alone(job, _flat(job, "allgather", "allreduce"))


def hitopkcomm(job: PlanningJob) -> Draft:
    """HiTopKComm (Shi et al. 2021): every tensor alone and compressed, sums of a node gathered between nodes.

    Ranks of a node first add their gradients, uncompressed. The payloads of these sums travel by all-gather between nodes. All
    tensors are compressed, on the device of the gradients, as ByteComp describes it (sections 5.2 and 6). The system's own Top-k
    for GPUs is left out; among several specs the best is taken.
    """
    return _alone(job, _by_system(job, "HiTopKComm", "allgather", job.rules.device))


def byteps_compress(job: PlanningJob) -> Draft:
    """BytePS-Compress (Zhong et al. 2021): every tensor alone and compressed on CPUs, by push and pull between nodes.

    Ranks of a node first add their gradients, uncompressed. A server decodes and adds the payloads of its shard and encodes the
    sum again, as ByteComp describes it (sections 5.1 and 6). Here each rank is the server of its shard; the system may have
    servers on other machines, and it can leave small tensors uncompressed. Among several specs the best is taken. If codecs were
    not timed on CPUs, nothing is compressed.
    """
    return _alone(job, _by_system(job, "BytePS-Compress", "alltoall", "cpu"))


def _alone(job: PlanningJob, ways: Sequence[tuple[str, ...]]) -> Draft:
    """Every tensor alone, all with the best spec and option among `ways`; uncompressed if no spec can travel by these options."""
    choices = [Choice(spec, tasks) for spec in job.specs for tasks in _with_moved(job, spec) if tasks in ways]
    drafts = [fused(job, layer_wise, choice) for choice in choices or job.plain[:1]]
    return best_of(job, iter(drafts)) or min(drafts, key=job.extra_bytes)


def _with_moved(job: PlanningJob, spec: Spec) -> list[tuple[str, ...]]:
    """The options of a spec, and these options with codecs on CPUs if CPUs may have codecs."""
    own = job.coded[spec]
    moved = [on_cpu(tasks) for tasks in own] if job.offloads else []
    return list(dict.fromkeys([*own, *(tasks for tasks in moved if carries(tasks, spec, job.rules.device))]))


def _by_system(job: PlanningJob, system: str, flat: str, device: str) -> list[tuple[str, ...]]:
    """A system's options with codecs on this device. With one node, or one rank a node, the options of a flat collective."""
    scheme = system if 1 < job.cluster.nodes < job.cluster.world_size else flat
    return [tasks_of(scheme, device, spec) for spec in job.specs]


def _flat(job: PlanningJob, *schemes: str) -> list[tuple[str, ...]]:
    """The options of these collectives for the specs, with codecs on either device."""
    ways = product(schemes, DEVICES, job.specs)
    return [tasks_of(scheme, device, spec) for scheme, device, spec in ways]


def best_of(job: PlanningJob, drafts: Iterator[Draft]) -> Draft | None:
    """The first draft with the shortest step; None if all exceed the limits."""
    best, step = None, NEVER
    for draft in drafts:
        found = job.step(draft, step - 1)
        if found is not None:
            best, step = draft, found
    return best
