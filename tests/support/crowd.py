"""Members of one elastic job, each a process on loopback, that tests start and kill."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_member import PATIENCE_S, TIMEOUT_S
from interpreters import Interpreters

__all__ = ["LEAST", "START_S", "Crowd", "Member", "taking_part"]

os.environ.setdefault("RUST_LOG", "error")  # a lighthouse says much in each step; torchft reads it when it is loaded

SCRIPT = Path(__file__).parent / "elastic_member.py"
LEAST = 2
"""Members at a time. With fewer no step counts."""
START_S = 60.0
"""For a member's first step, on a busy machine."""


@dataclass(eq=False)
class Member:
    """One process, and the lines that it wrote."""

    process: "subprocess.Popen[str]"
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    goes: bool = False
    """Whether it was killed or told to leave."""
    moved_s: float = field(default_factory=time.monotonic)
    """When it wrote its last line."""

    def __post_init__(self) -> None:
        self.reading = threading.Thread(target=self.read, daemon=True)

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The lines of steps that others made too. If it was killed, no other may have made its last one."""
        return self.steps[:-1] if self.goes else self.steps

    def read(self) -> None:
        """Read the lines, until the process ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            self.moved_s = time.monotonic()
            if "step" in said:
                self.steps.append({**said, "at_s": self.moved_s})
            else:
                self.end = said


class Crowd:
    """The members of one job, and their lighthouse."""

    def __init__(
        self,
        interpreters: Interpreters,
        plan: str,
        folder: str,
        batch: int = 16,
        silence_s: float = 3.0,
        timeout_s: float = TIMEOUT_S,
        seed: int = 0,
    ) -> None:
        """batch: the samples of each step of a member. silence_s: of the lighthouse; long for a busy machine. timeout_s: of the
        members. seed: of the first member; the next one has the next number."""
        from torchft.coordination import LighthouseServer

        self._interpreters, self._plan, self.folder = interpreters, plan, Path(folder)
        self._batch, self._timeout_s, self._seed = batch, timeout_s, seed
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,  # as `gradwire lighthouse`: members ask for LEAST
            join_timeout_ms=60_000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=round(1e3 * silence_s),
        )
        self.address = f"127.0.0.1:{urlsplit(self._lighthouse.address()).port}"
        self.all: list[Member] = []
        self.falls_after = 0
        """The steps that members make before their rate begins to fall; 0 where their end is not known yet."""

    @property
    def last_step(self) -> int:
        """The last step that a member has reported."""
        return max(each.steps[-1]["step"] for each in self.all if each.steps)

    @property
    def living(self) -> list[Member]:
        return [each for each in self.all if not each.goes and each.process.poll() is None]

    def join(self, plan: str | None = None, slow_s: float = 0.0, dies_at: int = 0) -> Member:
        """Start a member, with another plan than the others' if one is named. slow_s: how long its state takes to come. dies_at:
        the meeting in which it kills itself; 0: none."""
        words = [self.address, plan or self._plan, self._seed + len(self.all), self.folder, self._batch, self._timeout_s]
        command = [sys.executable, str(SCRIPT), *map(str, words)]
        paths = [str(SCRIPT.parents[2] / "src"), str(SCRIPT.parent)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"SLOW_S": str(slow_s), "DIES_AT": str(dies_at)}
        with open(self.folder / f"member-{len(self.all)}.log", "w") as log:
            process = self._interpreters.start(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        member = Member(process)
        self.all.append(member)
        member.reading.start()
        return member

    def join_and_die(self) -> None:
        """Start a member that kills itself when the others wait for it in its first meeting, and wait for its end."""
        member = self.join(dies_at=1)
        member.goes = True
        member.process.wait(START_S)

    def go(self, member: Member, number: signal.Signals) -> None:
        """Kill a member, or tell it to leave."""
        member.goes = True
        member.process.send_signal(number)

    def await_steps(self, members: list[Member], more: int, limit_s: float) -> float:
        """Wait until each of these has made so many steps more. Returns the longest time that one of them stood still. Raises
        TimeoutError if one stands still for longer than the limit, or ended."""
        aims = {id(each): len(each.steps) + more for each in members}
        began, longest = time.monotonic(), 0.0
        while waiting := [each for each in members if len(each.steps) < aims[id(each)]]:
            for each in waiting:
                still = time.monotonic() - max(began, each.moved_s)
                longest = max(longest, still)
                if still > limit_s or each.process.poll() is not None:
                    raise TimeoutError(f"no step for {still:.1f} s, exit code {each.process.poll()}\n{self.logs()}")
            time.sleep(0.01)
        return longest

    def finish(self, least: int = 0, fall: int = 0) -> list[Member]:
        """Let all that live end at one step: so many steps in which the rate falls after `least` or some more. Returns those that
        did, without one that was taken for dead just before: it finds no other any more."""
        while (step := self.last_step) < least - 30:
            self.await_steps(self.living, min(100, least - 30 - step), START_S)
        part = self.folder / "end.part"
        self.falls_after = max(least, step + 30)
        part.write_text(f"{self.falls_after} {self.falls_after + fall}")
        part.rename(self.folder / "end")
        ending = self.living
        for each in ending:
            each.process.wait(START_S + PATIENCE_S)
            each.reading.join(START_S)
        return [each for each in ending if each.end is None or not each.end["behind"]]

    def close(self) -> None:
        for each in self.all:
            each.process.kill()
            each.process.wait(10)
        self._lighthouse.shutdown()

    def logs(self) -> str:
        """The ends of what members wrote to stderr."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("member-*.log")))

    def samples_before_the_fall(self) -> int:
        """The samples of all members in the steps before their rate began to fall."""
        return self._batch * sum(count for step, count in taking_part(self.all).items() if step <= self.falls_after)

    def unequal_steps(self) -> list[int]:
        """The steps after which two members had different weights."""
        weights: dict[int, set[str]] = {}
        for member in self.all:
            for said in member.counted:
                weights.setdefault(said["step"], set()).add(said["weights"])
        return [step for step, found in weights.items() if len(found) > 1]


def taking_part(members: list[Member]) -> dict[int, int]:
    """The number of members whose gradients count in each step. A joiner that makes a step again writes the number of its first
    step, so the largest one is right."""
    found: dict[int, int] = {}
    for member in members:
        for said in member.counted:
            found[said["step"]] = max(said["taking_part"], found.get(said["step"], 0))
    return found
