"""The joint planner: buckets, spec and option of each, and the launch order, decided together on the simulated step.

It begins with the best of several whole plans: plain DDP's buckets, fixed buffers (DeAR's among them), gradwire's own policy,
Cupcake's exact fusion, and, for models of few tensors, ByteComp's selection. Each is tried with the first choices for all its
compressible buckets.
From there it takes every local move that makes the step shorter: another
choice for a bucket, two neighbours of a class merged, a bucket cut in two, later exchanges launched behind more or fewer
others. It ends when no move helps, or when so many steps have been simulated as `evaluations` allows; a count and not a time,
so that the same input gives the same plan.

Nothing is proven of the result but that it is no worse than any start. How far it may be from the best says
`Prediction.lower_bound_us`; `gradwire.planner.oracle.best_step_us` finds the truth for a handful of tensors.
"""

from collections.abc import Callable, Iterator, Sequence

from gradwire.core.checks import whole
from gradwire.errors import PlanError
from gradwire.planner.drafts import Choice, Draft, Job, Part
from gradwire.planner.starts import drafts_to_start_from, sorted_parts
from gradwire.sim.replay import NEVER

__all__ = ["EVALUATIONS", "improve", "joint"]

EVALUATIONS = 300
"""Steps simulated at most, by default."""


def joint(job: Job, evaluations: int = EVALUATIONS) -> Draft:
    """The best draft found. Raises PlanError if no start fits into the memory allowed."""
    whole("evaluations", evaluations, "how many steps may be simulated", low=1, error=PlanError)
    until = job.evaluations + evaluations
    best, step = None, NEVER
    for draft in drafts_to_start_from(job):
        if best is not None and job.evaluations >= until - evaluations // 2:
            break  # half is for the moves
        found = job.step(draft, step - 1)
        if found is not None:
            best, step = draft, found
    if best is None:
        raise PlanError(
            f"memory_bytes is {job.limits.memory_bytes}: no plan needs so little extra memory on a device, not even plain "
            "all-reduce. Allow more."
        )
    return improve(job, best, step, until)


def improve(job: Job, draft: Draft, step: int, until: int) -> Draft:
    """Take local moves until none helps, or until `job.evaluations` is `until`."""
    choices = job.choices()
    moves: Sequence[Callable[[Job, Draft, Sequence[Choice]], Iterator[Draft]]] = (_reorder, _merge, _choose, _cut)
    improved = True
    while improved:
        improved = False
        for move in moves:
            # a move that helped is tried again on what it made, from where it was
            tried = 0
            candidates = list(move(job, draft, choices))
            while tried < len(candidates) and job.evaluations < until:
                found = job.step(candidates[tried], step - 1)
                tried += 1
                if found is not None:
                    draft, step, improved = candidates[tried - 1], found, True
                    candidates = list(move(job, draft, choices))
        if job.evaluations >= until:
            break
    return draft


def _reorder(job: Job, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    for skew in range(4):
        if skew != draft.skew:
            yield draft._replace(skew=skew)


def _by_time(job: Job, draft: Draft) -> list[int]:
    """Buckets, those with most work first: to change these changes the step most."""
    return sorted(range(len(draft.parts)), key=lambda index: (-sum(job.program(draft.parts[index]).busy), index))


def _choose(job: Job, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    for index in _by_time(job, draft):
        part = draft.parts[index]
        for choice in choices:
            if choice != part.choice and job.may(part.tensors, choice):
                yield _with(draft, index, [part._replace(choice=choice)])


def _cut(job: Job, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """In halves of about as many bytes."""
    for index in _by_time(job, draft):
        tensors, choice = draft.parts[index]
        sizes = [job.profile.tensors[place].nbytes for place in tensors]
        half, sent = 0, 0
        while half < len(tensors) - 1 and (half == 0 or 2 * (sent + sizes[half]) <= sum(sizes)):
            sent += sizes[half]
            half += 1
        if half:
            yield _with(draft, index, [Part(tensors[:half], choice), Part(tensors[half:], choice)])


def _merge(job: Job, draft: Draft, choices: Sequence[Choice]) -> Iterator[Draft]:
    """Each bucket with the next one with which it may share one; the choice of the larger holds, if it may."""
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
