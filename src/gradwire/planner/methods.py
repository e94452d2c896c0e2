"""Planning methods by name, and explanations of their plans in words."""

import time
from typing import NamedTuple

from gradwire.core import Plan, word
from gradwire.errors import PlanError
from gradwire.plan import RESTRICTED
from gradwire.planner.bytecomp import Moved
from gradwire.planner.drafts import BYTECOMP_ONLY, Draft, PlanningJob, numbered
from gradwire.planner.joint import ALONE, FUSING, Planner, joint
from gradwire.planner.shards import with_shares
from gradwire.planner.starts import ddp_draft
from gradwire.sim import FS_PER_US

METHODS: dict[str, Planner] = {"joint": joint, **FUSING, **ALONE}
"""joint: `gradwire.planner.joint`. fusion: the best fusion; bucket: the best of 2 to 64 MB; even: the best of 2 to 32 groups;
layerwise: every tensor alone; each with the spec and option that are best for all. grace, hipress, hitopkcomm, byteps-compress:
the published systems. bytecomp: every tensor alone, by ByteComp's rules. ddp: plain all-reduce. More may be added."""


class MadePlan(NamedTuple):
    """A plan, and the facts about its search."""

    plan: Plan
    draft: Draft
    method: str
    planning_ms: float
    """Wall-clock time of the search and the prediction, without reading files."""
    note: str = ""
    """A note on the search; '' if there is none."""


def make_plan(job: PlanningJob, method: str = "joint") -> MadePlan:
    """The plan of a method. Raises PlanError if there is no such method, or if it needs a spec and there is none."""
    word("method", method, METHODS, error=PlanError)
    restrict = job.limits.restrict
    if restrict in BYTECOMP_ONLY and method != "bytecomp":
        cures = ["use the method bytecomp", f"use another restriction: {', '.join(sorted({*RESTRICTED} - {restrict}))}"]
        raise PlanError(
            f"restrict is {restrict!r} and method {method!r}: it says how ByteComp's selection chooses, and other methods have "
            f"their own way. {numbered(cures)}"
        )
    if method == "ddp" and job.limits.schedule != "backward":
        raise PlanError(
            f"schedule is {job.limits.schedule!r} and method 'ddp' is plain DDP, which exchanges in backward alone. "
            f"{numbered(['use the backward schedule', 'use another method, such as joint'])}"
        )
    began = time.perf_counter()
    found = METHODS[method](job)
    draft, note = found if isinstance(found, Moved) else (found, "")
    allowed = job.limits.memory_bytes
    if allowed is not None and (needed := job.extra_bytes(draft)) > allowed:
        raise PlanError(
            f"memory_bytes is {allowed}, and the plan of {method} needs {needed} of extra memory on a device. "
            f"{numbered(['use the method joint, which searches within a limit', f'allow {needed} bytes', 'set no limit'])}"
        )
    plan, shards = with_shares(job, job.plan(draft, ddp_draft(job)))
    note = "\n".join(filter(None, (note, shards)))
    return MadePlan(plan, draft, method, (time.perf_counter() - began) * 1e3, note)


def explain_plan(job: PlanningJob, made: MadePlan) -> str:
    """For each bucket what was decided and what it gains, and what the whole plan gains, or why nothing does."""
    lines = [f"{'bucket':>6} {'tensors':>7} {'MB':>9} {'gain ms':>9}  decided"]
    step = job.step(made.draft)
    for index, part in enumerate(made.draft.parts):
        gain = "" if step is None else f"{_gain_ms(job, made.draft, index, step):.3f}"
        size = job.size(part.tensors, part.choice.spec).raw / 1e6
        decided = f"{part.choice.spec!r} " if part.choice.encodes else ""
        lines.append(f"{index:>6} {len(part.tensors):>7} {size:>9.3f} {gain:>9}  {decided}{' '.join(part.choice.option)}")
    lines.append("Gain: how much longer the step would be with this bucket uncompressed, by the best uncompressed option.")
    return "\n".join([*lines, "", *_summary(job, made)]) + "\n"


def _gain_ms(job: PlanningJob, draft: Draft, index: int, step: int) -> float:
    part = draft.parts[index]
    if not part.choice.encodes:
        return 0.0
    steps = []
    for plain in job.plain:
        parts = (*draft.parts[:index], part._replace(choice=plain), *draft.parts[index + 1 :])
        steps.append(job.step(draft._replace(parts=parts)))
    return (min(other for other in steps if other is not None) - step) / FS_PER_US / 1e3


def _summary(job: PlanningJob, made: MadePlan) -> list[str]:
    prediction = made.plan.prediction
    assert prediction is not None
    step, baseline, least = (us / 1e3 for us in (prediction.step_us, prediction.baseline_step_us, prediction.lower_bound_us))
    lines = [made.note] if made.note else []
    lines.append(
        f"step {step:.3f} ms, plain DDP {baseline:.3f} ms, no plan below {least:.3f} ms; a rank sends "
        f"{prediction.bytes_per_rank / 1e6:.3f} MB, {prediction.extra_bytes_device / 1e6:.3f} MB of extra memory; "
        f"planned in {made.planning_ms:.0f} ms."
    )
    if job.embeddings and (unfit := [repr(spec) for spec in job.specs if not spec.keeps_zeros]):
        lines.append(
            f"Embeddings ({len(job.embeddings)}) are not sent with {' or '.join(unfit)}: without a code for zero, rows that no "
            "batch uses would change."
        )
    if round(step - baseline, 3) > 0:
        lines.append(_slower(job, step - baseline))
    if any(part.choice.encodes for part in made.draft.parts):
        return lines
    compute = job.line.after[-1] / FS_PER_US / 1e3
    pipelined = job.schedule.gathers_in_forward
    hiding = compute if pipelined else (job.line.after[-1] - job.line.after[0]) / FS_PER_US / 1e3
    link = max(sum(busy) for busy in zip(*(job.program(part).busy[2:] for part in made.draft.parts), strict=True))
    link_ms = link / FS_PER_US / 1e3
    if made.method == "ddp":
        lines.append("Nothing is compressed: plain DDP never does.")
    elif not job.specs:
        lines.append('Nothing is compressed: no spec was given. Name one or more, such as --spec "QSGD(bits=4)".')
    elif step <= 1.05 * compute and link_ms < hiding:
        lines.append(
            f"Nothing is compressed. compute-bound: communication hides behind {'computation' if pipelined else 'backward'} with "
            f"{hiding - link_ms:.3f} ms to spare; {step - compute:.3f} ms of the step are exposed."
        )
    else:
        lines.append("Nothing is compressed: encodes, decodes and more messages would take longer than they save on the links.")
    return lines


def _slower(job: PlanningJob, ms: float) -> str:
    """That plain DDP is so many milliseconds faster, and why, if ranks report to each other over a far link."""
    told = f"This plan is {ms:.3f} ms slower than plain DDP."
    reports_ms = job.simulator.reports / FS_PER_US / 1e3
    if not reports_ms or job.schedule.gathers_in_forward:
        return told
    return (
        f"{told} Each step ends with reports of all ranks on how it went, which plain DDP has not: {reports_ms:.3f} ms over this "
        "far link. Use --schedule pipelined, which waits for no reports, or local steps, which exchange less often."
    )
