"""The doctor's report: findings, the links with their rates, and the facts of every rank."""

from functools import partial
from typing import Literal

import msgspec

from gradwire.core.made import Made
from gradwire.doctor.facts import Facts
from gradwire.doctor.links import Direction

Severity = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One finding. A problem makes the exit code 1; a note needs no action if the setting is intended."""

    severity: Severity
    topic: str
    found: str
    why: str = ""
    """Why it matters."""
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
