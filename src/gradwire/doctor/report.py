"""Defines the doctor's report, and its tables of any width: findings, links with their rates, and the facts of every rank."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec
from rich.markup import escape
from rich.table import Table

from gradwire.core import Made
from gradwire.doctor.facts import Facts
from gradwire.doctor.links import Direction, rate_text

Severity = Literal["ok", "note", "problem"]
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """One finding. A problem makes the exit code 1; a note needs no action if the setting is intended."""

    severity: Severity
    topic: str
    found: str
    why: str = ""
    """The reason why the finding matters."""
    cure: str = ""
    """The remedy; empty if nothing has to be done."""


ok, note, problem = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "problem")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole examination; `to_json` is what `--json` prints."""

    version: int = 1
    made: Made
    world_size: int
    findings: tuple[Finding, ...]
    traps: tuple[Finding, ...]
    links: tuple[Direction, ...] = ()
    ranks: tuple[Facts, ...] = ()
    """The facts of the ranks that came."""

    @property
    def problems(self) -> int:
        return sum(finding.severity == "problem" for finding in self.findings)

    def to_json(self) -> str:
        """The report as JSON, with the number of problems first."""
        plain = {"problems": self.problems, **msgspec.to_builtins(self)}
        return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"


def tables(report: Report) -> Iterator[Table]:
    """Yield the tables of findings, links and traps."""
    yield _findings("gradwire doctor", report.findings)
    if report.links:
        yield _links(report)
    if report.traps:
        torch = next((facts.torch for facts in report.ranks if facts.torch), "torch")
        yield _findings(f"Known traps of torch {torch}", report.traps)


def summary(report: Report) -> str:
    """Return the last lines: the number of findings, and the problems once more."""
    problems = [finding for finding in report.findings if finding.severity == "problem"]
    notes = sum(finding.severity == "note" for finding in report.findings)
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "No problems"
    first = f"{count}, {notes} note{'s' * (notes != 1)}" + (":" if problems else ".")
    return "\n".join([first, *(f"  {finding.topic}: {finding.found}" for finding in problems)])


def _findings(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", min_width=6)
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        style = _STYLES[finding.severity]
        lines = [escape(finding.found)]
        if finding.why:
            lines.append(f"[dim]{escape(finding.why)}[/dim]")
        if finding.cure:
            lines.append(f"[{style}]->[/{style}] {escape(finding.cure)}")
        table.add_row(f"[{style}]{finding.severity}[/{style}]", escape(finding.topic), "\n".join(lines))
    return table


def _links(report: Report) -> Table:
    hosts = {facts.rank: facts.host for facts in report.ranks}
    table = Table(title="Links, in order around the ring", title_justify="left")
    for name in ("from rank", "to rank"):
        table.add_column(name, overflow="fold")
    for name in ("round trip, us", "rate of the bytes"):
        table.add_column(name, justify="right", overflow="fold")
    for link in report.links:
        round_trip = "-" if link.round_trip_us is None else f"{link.round_trip_us:.0f}"
        rate = "failed" if link.gbps is None else rate_text(link.gbps)
        ends = [f"{rank} ({escape(hosts.get(rank, '?'))})" for rank in (link.source, link.destination)]
        table.add_row(*ends, round_trip, rate)
    return table
