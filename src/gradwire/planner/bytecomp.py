"""ByteComp: every tensor alone, its option by Algorithm 1, then the offload to CPUs by Algorithm 2.

`published` is the published search. The search is greedy, and it assumes links that follow a launch order without lanes. So one
of its restrictions can end with a shorter step than the whole search, and so can one option for all tensors. `bytecomp` returns
the best of these plans, judged by the simulated step.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gradwire.errors import PlanError
from gradwire.plan import RESTRICTED, carries
from gradwire.planner.drafts import BYTECOMP_ONLY, Choice, Draft, Part, PlanningJob, exempt_of, numbered
from gradwire.planner.offload import offload, on_cpu
from gradwire.planner.select import by_own_times, select_options
from gradwire.planner.starts import best_of, fused_by, layer_wise
from gradwire.sim import ReplayProgram

MOST = 1000
"""Most products of counts of which the offload tries all. If there are more, the offload uses coordinate descent."""


class Moved(NamedTuple):
    """A draft after ByteComp's Algorithm 2."""

    draft: Draft
    way: str
    """Description of the offload's search."""


def bytecomp(job: PlanningJob) -> Moved:
    """The published search's plan, or a better one: from one of its restrictions, or with one option for all tensors.

    For a job with a restriction, the published search's plan alone. Raises PlanError as `published` does.
    """
    selected = _selected(job, None)
    whole = _offloaded(job, selected, MOST)
    if job.limits.restrict is not None or not job.specs:
        return whole
    found = {whole.draft: whole.way}
    for name, moved in [("the search without offload", Moved(selected, "Nothing is offloaded.")), *_simpler(job)]:
        found.setdefault(moved.draft, f"The whole search ends with a longer step than {name}, which is taken. {moved.way}")
    best = best_of(job, iter(found))
    return whole if best is None else Moved(best, found[best])


def _simpler(job: PlanningJob) -> Iterator[tuple[str, Moved]]:
    """The plans of restricted searches, and of simpler rules."""
    searched = [(job.plain, job.coded)]
    for restrict in dict.fromkeys((*RESTRICTED, *BYTECOMP_ONLY)):
        with suppress(PlanError):  # no option or device is left for this job, or some tensors must not be compressed
            part = job.restricted(restrict)
            if restrict not in BYTECOMP_ONLY and (part.plain, part.coded) in searched:
                continue
            searched.append((part.plain, part.coded))
            yield f"the search restricted to {restrict}", published(part)
    yield "one option for all tensors", Moved(fused_by(job, layer_wise), "Nothing is offloaded.")


def published(job: PlanningJob, looks: int | None = None, most: int = MOST) -> Moved:
    """ByteComp's selection among all options for every spec, and its offload.

    looks, most: see `select_options` and `offload`. Raises PlanError if all tensors are to be compressed, and some must not be.
    """
    return _offloaded(job, _selected(job, looks), most)


def _selected(job: PlanningJob, looks: int | None) -> Draft:
    """Run Algorithm 1."""
    restrict = job.limits.restrict
    # tables of embeddings end before the specs that have no code for zero
    specs = sorted(job.specs, key=lambda spec: bool(job.embeddings) and not spec.keeps_zeros)
    choices = [*job.plain, *(Choice(spec, option) for spec in specs for option in job.coded[spec])]
    if restrict == "all-compressed":
        choices = choices[len(job.plain) :] or choices
        _check_all_may(job, choices)
    tensors = job.profile.tensors
    by_size: dict[tuple[object, ...], list[ReplayProgram]] = {}
    tables = []
    for place, tensor in enumerate(tensors):
        key = (tensor.shape, tensor.dtype, place in job.exempt, place in job.embeddings)
        if key not in by_size:
            by_size[key] = job.programs((place,), [choice for choice in choices if job.may((place,), choice)])
        tables.append(by_size[key])
    if restrict == "myopic":
        chosen = by_own_times(tables)
    else:
        chosen = select_options(job.line, tables, [tensor.nbytes for tensor in tensors], looks=looks).chosen
    return Draft(tuple(Part((place,), choices[index]) for place, index in enumerate(chosen)))


def _check_all_may(job: PlanningJob, choices: Sequence[Choice]) -> None:
    """Raise PlanError if a tensor may have none of the choices."""
    tensors = range(len(job.profile.tensors))
    left = [place for place in tensors if not any(job.may((place,), choice) for choice in choices)]
    if not left:
        return
    cures = ["search without restrict='all-compressed'"]
    if job.embeddings.union(exempt_of(job.profile, msgspec.structs.replace(job.limits, exempt_vectors=False))).isdisjoint(left):
        cures.insert(0, "let all tensors be compressed (--all-tensors)")
    raise PlanError(f"restrict is 'all-compressed', but {len(left)} tensors must stay uncompressed. {numbered(cures)}")


def _offloaded(job: PlanningJob, draft: Draft, most: int) -> Moved:
    """Run Algorithm 2."""
    if not job.offloads:
        return Moved(draft, "Nothing is offloaded: codecs may run on one device only, or were timed on one only.")
    parts = draft.parts
    coded = [place for place, part in enumerate(parts) if part.choice.encodes]
    elsewhere = {}
    for place in coded:
        spec, option = parts[place].choice.spec, on_cpu(parts[place].choice.option)
        if carries(option, spec, job.rules.device):
            elsewhere[place] = parts[place]._replace(choice=Choice(spec, option))
    if coded and not elsewhere:
        specs = " and ".join(sorted({repr(parts[place].choice.spec) for place in coded}))
        way = f"Nothing is offloaded: payloads of {specs} can only be encoded on the device of the gradients."
        return Moved(draft, way)
    moved = {place: job.program(part) for place, part in elsewhere.items()}
    groups = [(job.profile.tensors[place].nbytes, part.choice) for place, part in enumerate(parts)]
    found = offload(job.line, [job.program(part) for part in parts], moved, groups, most=most)
    way = "all products of counts" if found.exhaustive else "coordinate descent over groups, which may miss the best"
    return Moved(
        draft._replace(parts=tuple(elsewhere[p] if p in found.tensors else part for p, part in enumerate(parts))),
        f"Offloaded to CPUs: {len(found.tensors)} of {len(coded)} compressed tensors, searched by {way}; "
        f"{found.simulated} steps simulated.",
    )
