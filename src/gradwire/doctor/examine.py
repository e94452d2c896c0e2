"""Examines a machine or a job: gathers facts, meets the other ranks, measures the links, reports.

A single process examines itself. In a job, rank 0 shows the report, and all ranks exit with its code.
"""

import os
import sys
from collections.abc import Callable, Mapping

from gradwire.core import Made
from gradwire.doctor.differences import rank_list
from gradwire.doctor.facts import Facts, gather_facts
from gradwire.doctor.machine import emulation_finding, machine_findings, traps_of
from gradwire.doctor.meeting import LATE_S, Job, Say, Survey, longest_s, take_part
from gradwire.doctor.ranks import survey_findings
from gradwire.doctor.report import Finding, Report, ok, problem
from gradwire.testbed import permission_problem

Show = Callable[[Report], None]


def examine(timeout_s: float, show: Show, say: Say = lambda text: None, environ: Mapping[str, str] = os.environ) -> int:
    """Examine this machine and, if the environment names a job of several ranks, the job. Returns the exit code.

    timeout_s: how long ranks wait for each other. show gets the report, on rank 0 only; say gets the current activity. If a
    link or a rank hangs, the process ends here, because an orderly exit would wait.
    """
    say("looking at this machine")
    facts = gather_facts(environ)
    alone = Survey(present={0: facts})
    try:
        job = Job.of(environ)
    except ValueError as error:
        impossible = problem(
            "job",
            str(error),
            "init_process_group would fail. No link was measured.",
            "Let torchrun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set all four; set none outside of a job.",
        )
        return _judged(facts, [impossible], show, alone)
    if job is None or job.world_size == 1:
        how = (
            "not measured: this is one process alone. To measure, run `torchrun ... -m gradwire doctor` on every node, or on two "
            "emulated nodes `gradwire emulate --nodes 2 -- -m gradwire doctor`"
        )
        return _judged(facts, [ok("links", how)], show, alone)
    if facts.torch_problem is not None:
        absent = f"rank {job.rank} cannot meet the others without torch"
        return _judged(facts, [problem("links", absent, "They wait for it.", "Install torch on this node.")], show, alone)
    return _lead(job, timeout_s, facts, show, say) if job.rank == 0 else _attend(job, timeout_s, facts)


def _judged(facts: Facts, of_the_job: list[Finding], show: Show, survey: Survey, world_size: int = 1) -> int:
    report = Report(
        made=Made.now(),
        world_size=world_size,
        findings=(*machine_findings(facts), emulation_finding(permission_problem()), *of_the_job),
        traps=tuple(traps_of(facts.torch)),
        links=tuple(survey.directions),
        ranks=tuple(each for _, each in sorted(survey.present.items())),
    )
    show(report)
    return 1 if report.problems else 0


def _lead(job: Job, timeout_s: float, facts: Facts, show: Show, say: Say) -> int:
    """Examine the job as rank 0. Returns the exit code."""
    survey, stuck = Survey(present={0: facts}), False
    try:
        meeting = take_part(job, timeout_s, facts, survey, say)
    except ConnectionError as error:
        survey.stopped = f"rank 0 could not go on: {error}"
    code = _judged(facts, survey_findings(survey, job.world_size, timeout_s), show, survey, job.world_size)
    try:
        if survey.stopped is None:
            meeting.write_note("code", code)
            meeting.read_notes("bye", survey.present.keys() - {0}, bool, LATE_S)
    except ConnectionError:
        stuck = True
    return _leave(code, stuck)


def _attend(job: Job, timeout_s: float, facts: Facts) -> int:
    """Take part in the examination as a rank other than 0. Returns rank 0's exit code."""
    survey, words = Survey(), ""
    try:
        meeting = take_part(job, timeout_s, facts, survey)
        code = meeting.read_rank_0("code", int, longest_s(job.world_size, timeout_s))
        meeting.write_note("bye", True)
        if survey.missing:
            words = f"rank {job.rank} leaves with rank 0, which waited for {rank_list(survey.missing)}."
    except ConnectionError as error:
        code, words = 1, str(error)
    if words:
        print(f"gradwire doctor: {words}", file=sys.stderr)
    return _leave(code)


def _leave(code: int, stuck: bool = False) -> int:
    """Free the gloo group and return the code, or end the process at once after problems."""
    if code != 0 or stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    import torch.distributed as dist

    dist.destroy_process_group()
    return code
