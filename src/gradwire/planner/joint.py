"""The joint planner: buckets, spec and option of each, and the launch order, decided together on the simulated step.

The search begins with whole plans: plain DDP's, fixed buffers (such as DeAR's), gradwire's policy, and all other methods'.

From each of the best plans the search takes every local move that makes the step shorter: launch later exchanges behind
more or fewer others, leave the first buckets uncompressed, give a bucket another choice, move tensors to the neighbouring
bucket, cut a bucket in two, merge two neighbours of a class, let compressed buckets carry exempt tensors. The search ends when
no move helps, or at a limit of simulated steps. A count, not a time, ends the search, so the same input gives the same plan.

The result is no worse than any start, so no worse than the plan of any other method. `Prediction.lower_bound_us` bounds the
distance from the best plan; `benchmarks.papers.oracle.best_step_us` finds the best plan for a handful of tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeAlias

from gradwire.core import Spec, whole
from gradwire.errors import PlanError
from gradwire.plan import Policy
from gradwire.planner.bytecomp import Moved, bytecomp, published
from gradwire.planner.drafts import Choice, Draft, Part, PlanningJob, numbered
from gradwire.planner.starts import (
    by_lines,
    byteps_compress,
    close_after,
    close_before,
    ddp_draft,
    even_split,
    fused,
    fused_by,
    fusion,
    grace,
    hipress,
    hitopkcomm,
    layer_wise,
    sorted_parts,
)
from gradwire.sim import NEVER

EVALUATIONS, EVALUATIONS_BY_EVENTS = 1500, 300
"""Most steps that the moves may simulate. A step that is simulated event by event takes a hundred times as long."""
_STARTS = 3
"""Number of the best starts from which the search tries moves."""
FEW = 32
"""Most tensors with which ByteComp's selection is among the starts of a search with limited steps. The selection takes at least
one simulation for each tensor."""
MOST_CANDIDATES = 40_000
"""Most tensors times options with which ByteComp is among the starts of a whole search. BERT-base has 34,626 with one spec."""

Planner: TypeAlias = Callable[[PlanningJob], Draft | Moved]

FUSING: dict[str, Planner] = {
    "fusion": fusion,
    "bucket": partial(fused_by, strategy=close_after),
    "even": partial(fused_by, strategy=even_split),
    "ddp": ddp_draft,
}
ALONE: dict[str, Planner] = {
    "layerwise": partial(fused_by, strategy=layer_wise),
    "grace": grace,
    "hipress": hipress,
    "hitopkcomm": hitopkcomm,
    "byteps-compress": byteps_compress,
    "bytecomp": bytecomp,
}
"""The other methods, by name: those that make buckets, and those that leave every tensor alone."""


def joint(job: PlanningJob, evaluations: int | None = None, moves: int | None = None) -> Draft:
    """Search for the draft with the shortest step.

    evaluations: most steps to simulate, the steps of starts included; the starts are then the quick ones. None: all starts, and
    after them `moves` steps. moves: None is EVALUATIONS or EVALUATIONS_BY_EVENTS. Raises PlanError if no start fits the memory.
    """
    starts: dict[Draft, int] = {}
    begun, until = job.evaluations, None
    if evaluations is not None:
        whole("evaluations", evaluations, "how many steps may be simulated", low=1, error=PlanError)
        until = begun + evaluations
    for draft in every_start(job, starts) if evaluations is None else quick_starts(job):
        if starts and until is not None and job.evaluations >= until - (until - begun) * 2 // 3:
            break  # the rest is for the moves
        if draft not in starts and (found := job.step(draft)) is not None:
            starts[draft] = found
    if not starts:
        least = job.extra_bytes(ddp_draft(job))
        cures = [f"allow {least} bytes, as plain all-reduce needs", "set no limit"]
        raise PlanError(
            f"memory_bytes is {job.limits.memory_bytes}: every plan needs more extra memory on a device, even plain all-reduce. "
            f"{numbered(cures)}"
        )
    if until is None:
        until = job.evaluations + (moves or (EVALUATIONS_BY_EVENTS if job.event_by_event else EVALUATIONS))
    ends, best = [], sorted(starts.items(), key=lambda start: start[1])[:_STARTS]
    for number, (draft, step) in enumerate(best):
        share = (until - job.evaluations) // (len(best) - number)
        ends.append(improve(job, draft, step, job.evaluations + share))
    return min(ends, key=lambda end: end[0])[1]


def fixed_starts(job: PlanningJob) -> Iterator[Draft]:
    """Plans that take no search: fixed buffers, and gradwire's own policy."""
    yield ddp_draft(job)
    choices, infos = job.choices(6), job.profile.tensor_infos(job.rules.device)
    place = {info.name: index for index, info in enumerate(infos)}
    by_policy: dict[Spec, list[tuple[int, ...]]] = {}
    for choice in choices:
        for limit in (5, 8, 16, 32):
            yield fused(job, partial(close_before, limit=limit * 2**20), choice)
        if choice.spec not in by_policy:
            policy = Policy(default=choice.spec, exempt_vectors=job.limits.exempt_vectors)
            buckets = policy.plan(infos, job.cluster.world_size, job.cluster.ranks_per_node_if_even).buckets
            by_policy[choice.spec] = [tuple(place[name] for name in bucket.tensors) for bucket in buckets]
        parts = [Part(b, choice if job.may(b, choice) else job.plain[0]) for b in by_policy[choice.spec]]
        yield Draft(sorted_parts(parts))


def quick_starts(job: PlanningJob) -> Iterator[Draft]:
    """Plans in ascending order of planning time."""
    yield from fixed_starts(job)
    for choice in job.choices(6):
        yield fused(job, by_lines, choice)
    if len(job.profile.tensors) <= FEW:
        yield published(job, looks=1).draft


def every_start(job: PlanningJob, found: Mapping[Draft, int]) -> Iterator[Draft]:
    """Fixed starts, then the plans of all other methods. found: the starts so far with their steps.

    Methods that leave every tensor alone are skipped if all their plans certainly have longer steps than the best start.
    """
    yield from fixed_starts(job)
    for method in FUSING.values():
        yield _draft_of(method, job)
    least = job.least_alone()
    for name, method in ALONE.items():
        if min(found.values(), default=NEVER) <= least:
            return
        options = len(job.plain) + sum(map(len, job.coded.values()))
        if name != "bytecomp" or len(job.profile.tensors) * options <= MOST_CANDIDATES:
            yield _draft_of(method, job)


def _draft_of(method: Planner, job: PlanningJob) -> Draft:
    found = method(job)
    return found.draft if isinstance(found, Moved) else found


def improve(job: PlanningJob, draft: Draft, step: int, until: int) -> tuple[int, Draft]:
    """Take local moves until none helps, or until `job.evaluations` is `until`. Returns (femtoseconds of the step, draft)."""
    choices = job.choices()
    improved = True
    while improved and job.evaluations < until:
        improved = False
        for move in (_carry, _reorder, _leave_first, _choose, _shift, _cut, _merge):
            # after a move that helped, the same kind of move goes on with the new draft
            tried, candidates = 0, move(job, draft, choices)
            while job.evaluations < until and (candidate := next(candidates, None)) is not None:
                tried += 1
                found = job.step(candidate, step - 1)
                if found is not None:
                    draft, step, improved = candidate, found, True
                    candidates = islice(move(job, draft, choices), tried, None)
    return step, draft


def _carry(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Move exempt tensors of uncompressed buckets into the next compressed buckets that become ready, or the last ones."""
    parts, moved = list(draft.parts), False
    for part in draft.parts:
        if part.choice.encodes or not job.exempt.issuperset(part.tensors):
            continue
        coded = [index for index, each in enumerate(parts) if each.choice.encodes]
        carriers = [i for i in coded if job.may((*parts[i].tensors, *part.tensors), parts[i].choice)]
        if not carriers:
            continue
        for place in part.tensors:
            index = next((i for i in carriers if parts[i].tensors[-1] > place), carriers[-1])
            parts[index] = parts[index]._replace(tensors=tuple(sorted((*parts[index].tensors, place))))
        parts[parts.index(part)] = part._replace(tensors=())
        moved = True
    if moved:
        yield draft._replace(parts=sorted_parts([part for part in parts if part.tensors]))


def _reorder(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    for skew in range(4):
        if skew != draft.skew:
            yield draft._replace(skew=skew)


def _by_time(job: PlanningJob, draft: Draft) -> list[int]:
    """Indices of the buckets by descending work: changing the buckets with most work changes the step most."""
    return sorted(range(len(draft.parts)), key=lambda index: (-sum(job.program(draft.parts[index]).busy), index))


def _choose(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    for index in _by_time(job, draft):
        part = draft.parts[index]
        for choice in choices:
            if choice != part.choice and job.may(part.tensors, choice):
                yield _with(draft, index, [part._replace(choice=choice)])


def _leave_first(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Leave the first buckets uncompressed: backward hides their exchanges, but not their codecs."""
    for plain in [choice for choice in choices if not choice.encodes][:2]:
        for count in range(len(draft.parts), 0, -1):
            first = tuple(part._replace(choice=plain) for part in draft.parts[:count])
            if first != draft.parts[:count]:
                yield draft._replace(parts=first + draft.parts[count:])


def _shift(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Move tensors from the end of a bucket to the next bucket of its class, or from the start of that bucket."""
    for index, part in enumerate(draft.parts):
        for other in range(index + 1, len(draft.parts)):
            following = draft.parts[other]
            if part.choice.encodes != following.choice.encodes or part.tensors[-1] > following.tensors[0]:
                continue
            tensors, border = part.tensors + following.tensors, len(part.tensors)
            for cut in (border - 1, border - border // 2, border + 1, border + len(following.tensors) // 2):
                moved = part._replace(tensors=tensors[:cut]), following._replace(tensors=tensors[cut:])
                if 0 < cut < len(tensors) and cut != border and all(job.may(*each) for each in moved):
                    parts = list(draft.parts)
                    parts[index], parts[other] = moved
                    yield draft._replace(parts=sorted_parts(parts))
            break


def _cut(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Cut a bucket into halves of about equal bytes."""
    for index in _by_time(job, draft):
        tensors, choice = draft.parts[index]
        sizes = [job.profile.tensors[place].nbytes for place in tensors]
        half, sent = 0, 0
        while half < len(tensors) - 1 and (half == 0 or 2 * (sent + sizes[half]) <= sum(sizes)):
            sent += sizes[half]
            half += 1
        if half and job.may(tensors[:half], choice) and job.may(tensors[half:], choice):
            yield _with(draft, index, [Part(tensors[:half], choice), Part(tensors[half:], choice)])


def _merge(job: PlanningJob, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Merge each bucket with the next one of its class; the merged bucket gets the choice of the larger."""
    for index, part in enumerate(draft.parts):
        for other in range(index + 1, len(draft.parts)):
            following = draft.parts[other]
            larger = max(part, following, key=lambda each: sum(job.program(each).busy))
            tensors = tuple(sorted(part.tensors + following.tensors))
            alike = part.choice.encodes == following.choice.encodes
            if alike and job.may(tensors, larger.choice):
                rest = [p for i, p in enumerate(draft.parts) if i not in (index, other)]
                yield draft._replace(parts=sorted_parts([*rest, Part(tensors, larger.choice)]))
                break


def _with(draft: Draft, index: int, parts: Sequence[Part]) -> Draft:
    return draft._replace(parts=sorted_parts([*draft.parts[:index], *parts, *draft.parts[index + 1 :]]))
