"""The order of an examination: gather facts, meet the other ranks, measure the links, judge, show, part.

Alone, a process examines itself. In a job rank 0 shows the report; the others wait for it and leave with its exit code.
"""

import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from gradwire.core.made import Made
from gradwire.doctor.board import bounded
from gradwire.doctor.differences import rank_list
from gradwire.doctor.facts import Facts, gather_facts
from gradwire.doctor.job import Job
from gradwire.doctor.machine import emulation_finding, machine_findings
from gradwire.doctor.ranks import survey_findings
from gradwire.doctor.rendezvous import Meeting, Survey
from gradwire.doctor.report import Finding, Report
from gradwire.doctor.traps import traps_of
from gradwire.testbed import permission_problem

__all__ = ["examine"]


def examine(
    timeout_s: float,
    show: Callable[[Report], None],
    say: Callable[[str], None] = lambda text: None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Examine this machine and, where the environment names a job of several ranks, the job. The exit code.

    timeout_s: how long ranks wait for each other. show gets the report, on rank 0 only; say, now and then, what is being
    done. Where a link or a rank hangs the process is ended here, since an orderly exit would wait for it.
    """
    say("looking at this machine")
    facts = gather_facts(environ)
    try:
        job = Job.of(environ)
    except ValueError as error:
        return _alone(facts, show, _impossible(str(error)))
    if job is None or job.world_size == 1 or facts.torch_problem is not None:
        return _alone(facts, show, _how_to_measure(facts, job))
    meeting = Meeting(job, timeout_s)
    return _lead(meeting, facts, show, say) if job.rank == 0 else _attend(meeting, facts)


def _alone(facts: Facts, show: Callable[[Report], None], about_links: Finding) -> int:
    return _judged(facts, [about_links], show)


def _judged(
    facts: Facts,
    of_the_job: list[Finding],
    show: Callable[[Report], None],
    survey: Survey | None = None,
    world: int = 1,
) -> int:
    report = Report(
        made=Made(
            host=facts.host,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=" ".join(["gradwire", *sys.argv[1:]]),
        ),
        world_size=world,
        findings=(*machine_findings(facts), emulation_finding(permission_problem()), *of_the_job),
        traps=tuple(traps_of(facts.torch)),
        links=tuple(survey.directions) if survey else (),
        ranks=tuple(each for _, each in sorted(survey.present.items())) if survey and survey.present else (facts,),
    )
    show(report)
    return 1 if report.problems else 0


def _lead(meeting: Meeting, facts: Facts, show: Callable[[Report], None], say: Callable[[str], None]) -> int:
    """Rank 0."""
    survey, stuck, world = Survey(present={0: facts}), False, meeting.job.world_size

    def meet() -> Survey:
        meeting.open()
        meeting.sign_in(facts)
        survey = meeting.call_roll(say)
        if not survey.missing:
            meeting.connect()
            if meeting.check_connections(survey, say):
                say("measuring the links, one after another")
                meeting.measure()
                meeting.collect(survey, say)
        return survey

    try:
        survey = bounded(meet, meeting.longest_s)
    except (ConnectionError, TimeoutError) as error:
        survey.stopped, stuck = f"rank 0 could not go on: {error}", True
    code = _judged(facts, survey_findings(survey, world, meeting.timeout_s), show, survey, world)
    if survey.stopped is None:
        try:
            meeting.dismiss(code, survey.present)
        except ConnectionError:
            stuck = True
    return _leave(meeting, code, stuck or code != 0)


def _attend(meeting: Meeting, facts: Facts) -> int:
    """Every other rank."""

    def attend() -> tuple[int, str]:
        rank = f"rank {meeting.job.rank}"
        meeting.open()
        if not meeting.sign_in(facts):
            return 1, f"another process is {rank} already; this one leaves."
        missing = meeting.hear_roll()
        if not missing:
            meeting.connect()
            if meeting.hear_of_connections():
                meeting.measure()
        code = meeting.hear_dismissal(meeting.longest_s)
        return code, f"{rank} leaves with rank 0, which waited for {rank_list(missing)}." if missing else ""

    try:
        code, words = bounded(attend, 2 * meeting.longest_s)
    except (ConnectionError, TimeoutError) as error:
        code, words = 1, str(error)
    if words:
        print(f"gradwire doctor: {words}", file=sys.stderr)
    return _leave(meeting, code, code != 0)


def _leave(meeting: Meeting, code: int, at_once: bool) -> int:
    """Close and return the code, or end the process where something that hangs would hold up its exit."""
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    meeting.close()
    return code


def _impossible(said: str) -> Finding:
    return Finding(
        topic="job",
        severity="problem",
        found=said,
        why="init_process_group would fail. No link was measured.",
        cure="Let torchrun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set all four; outside of a job, none.",
    )


def _how_to_measure(facts: Facts, job: Job | None) -> Finding:
    if facts.torch_problem is not None and job is not None and job.world_size > 1:
        return Finding(
            topic="links",
            severity="problem",
            found=f"rank {job.rank} cannot meet the others without torch",
            why="They wait for it.",
            cure="Install torch on this node.",
        )
    return Finding(
        topic="links",
        severity="ok",
        found="not measured: this is one process alone. On a cluster run `torchrun ... -m gradwire doctor` on every node, as "
        "the job would be started; to try it on two emulated nodes, `gradwire emulate --nodes 2 -- -m gradwire doctor`",
    )
