"""Times the papers' searches: Cupcake's Table 1, ByteComp's Tables 5 and 6. Times are CPU time of one thread."""

import math
import time
import warnings
from collections import Counter
from typing import NamedTuple

from benchmarks.papers.cupcake import algorithm_1
from benchmarks.testbeds import gathered
from gradwire.planner.bytecomp import published
from gradwire.planner.drafts import Choice, Draft, PlanningJob
from gradwire.planner.fusion import optimal
from gradwire.planner.offload import offload, on_cpu
from gradwire.planner.pareto import improved
from gradwire.planner.partition import Fusion, evaluate
from gradwire.planner.starts import along_lines, by_curves, close_after, even_split
from gradwire.sim.simulator import FS_PER_US

__all__ = [
    "PRUNINGS", "FusionGains", "FusionSearch", "OffloadSearch", "OptionSearch", "best_fusion_over_rules", "fusion_searches",
    "offload_search", "option_search",
]  # fmt: skip

MOST_TRIED = 3_000_000
"""Buckets that the exact search along curves may try: some seconds."""

PRUNINGS = {
    "Algorithm 1": (True, True),
    "only pruning 1": (True, False),
    "only pruning 2": (False, True),
    "no pruning": (False, False),
}
"""Rows of Cupcake's Table 1: whether pruning 1 and pruning 2 are on."""


class FusionSearch(NamedTuple):
    """One search for the best fusion."""

    name: str
    ms: float
    calls: int | None
    """Number of calls of FindOptFusion; None for the exact search."""
    finished: bool
    over_best: float
    """The step of its plan over the shortest."""


def fusion_searches(job: PlanningJob, choice: Choice, seconds: float) -> list[FusionSearch]:
    """gradwire's exact search, and Algorithm 1 with both prunings, with one and with none, each stopped after so many seconds.

    All take the same lines through the costs, since the prunings are proven for lines only.
    """
    (tensors,) = job.classes(choice.spec)
    costs = along_lines(job.fusion_costs(choice))
    began = time.process_time()
    best = optimal(tensors.gaps_us, tensors.nbytes, costs.encode, costs.exchange, costs.decode, costs.decoding)
    found = [FusionSearch("gradwire's exact search", _ms_since(began), None, True, 1.0)]
    for name, (one, two) in PRUNINGS.items():
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            search = algorithm_1(tensors.gaps_us, tensors.nbytes, costs, pruning_1=one, pruning_2=two, seconds=seconds)
        ratio = search.fusion.step_us / best.step_us
        found.append(FusionSearch(name, _ms_since(began), search.calls, search.finished, ratio))
    return found


class FusionGains(NamedTuple):
    """The steps of two rules of fusion over the step of the best fusion, as the cost model has them."""

    over_bucket: float
    over_even: float
    proven: bool
    """Whether the best fusion is certainly the best."""


def best_fusion_over_rules(job: PlanningJob) -> FusionGains:
    """The most that any fusion with the paper's option gains over Cupcake's two rules, along the published curves."""
    choice = Choice(job.specs[0], gathered(job))
    (tensors,) = job.classes(choice.spec)
    costs = job.fusion_costs(choice)
    steps = []
    for rule in (by_curves, close_after, even_split):
        ends = rule(tensors.gaps_us, tensors.nbytes, costs)
        steps.append(Fusion(ends, evaluate(ends, tensors.gaps_us, tensors.nbytes, costs)))
    known = min(steps, key=lambda fusion: fusion.step_us)
    best, proven = improved(tensors.gaps_us, tensors.nbytes, costs, known, most=MOST_TRIED)
    return FusionGains(steps[1].step_us / best.step_us, steps[2].step_us / best.step_us, proven)


class OptionSearch(NamedTuple):
    """ByteComp's Algorithm 1 on one job."""

    tensors: int
    options: int
    """Number of options of one tensor, compressed or not."""
    compressed: int
    """Tensors that it compresses."""
    ms: float
    step_ms: float
    short_ms: float
    """Time of the search that simulates one candidate a tensor."""
    short_over_whole: float
    """The step of that search over the whole one's."""
    brute_force_log10_s: float
    """Logarithm of the seconds that all strategies take at the time of one simulated step: an estimate."""
    draft: Draft


def option_search(job: PlanningJob) -> OptionSearch:
    """Whole, and cut short to one look a tensor. The tables of tasks are made before, as for every search on the job."""
    published(job, looks=1)
    began = time.process_time()
    short = published(job, looks=1).draft
    short_ms = _ms_since(began)
    began = time.process_time()
    draft = published(job).draft
    ms = _ms_since(began)
    step, short_step = job.step(draft), job.step(short)
    assert step is not None and short_step is not None
    tensors, options = len(job.profile.tensors), len(job.options)
    return OptionSearch(
        tensors=tensors,
        options=options,
        compressed=sum(part.choice.encodes for part in draft.parts),
        ms=ms,
        step_ms=step / FS_PER_US / 1e3,
        short_ms=short_ms,
        short_over_whole=short_step / step,
        brute_force_log10_s=tensors * math.log10(options) + math.log10(_one_step_s(job, draft)),
        draft=draft,
    )


class OffloadSearch(NamedTuple):
    """ByteComp's Algorithm 2 on one job."""

    tensors: int
    """Compressed ones, each of which may move."""
    groups: int
    products: int
    """Strategies: products of counts over groups."""
    exhaustive: bool
    """Whether all products were tried; else coordinate descent."""
    moved: int
    ms: float
    gain: float
    """The step before over the step after."""
    brute_force_log10_s: float
    """Logarithm of the seconds that all 2^tensors strategies take at the time of one simulated step: an estimate."""


def offload_search(job: PlanningJob, draft: Draft, most: int = 100_000) -> OffloadSearch:
    """Search for the compressed tensors of a draft that go to CPUs. most: the number of products up to which all are tried."""
    parts = draft.parts
    moved = {
        place: job.program(part._replace(choice=Choice(part.choice.spec, on_cpu(part.choice.option))))
        for place, part in enumerate(parts)
        if part.choice.encodes
    }
    groups = [(job.profile.tensors[part.tensors[0]].nbytes, part.choice) for part in parts]
    programs = [job.program(part) for part in parts]
    began = time.process_time()
    found = offload(job.line, programs, moved, groups, most=most)
    ms = _ms_since(began)
    before = job.step(draft)
    assert before is not None
    counts = Counter(groups[place] for place in moved)
    return OffloadSearch(
        tensors=len(moved),
        groups=len(counts),
        products=math.prod(count + 1 for count in counts.values()),
        exhaustive=found.exhaustive,
        moved=len(found.tensors),
        ms=ms,
        gain=before / found.replayed.step,
        brute_force_log10_s=len(moved) * math.log10(2) + math.log10(_one_step_s(job, draft)),
    )


def _ms_since(began: float) -> float:
    return (time.process_time() - began) * 1e3


def _one_step_s(job: PlanningJob, draft: Draft, times: int = 20) -> float:
    began = time.process_time()
    for _ in range(times):
        job.step(draft)
    return max(1e-9, (time.process_time() - began) / times)
