"""What a trial needs around its fault: ranks, a job of the seed's choice, and what must hold afterwards."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worlds import Outcome, Place, World

from gradwire.testbed import EmulatedCluster
from soak.settings import HOOK, INTEGRATIONS, Job, chance_of, settings_of, specs_of
from soak.training import End, Progress, train, train_twice

TIMEOUT_S = 5.0
"""Of the process group."""
ALLOWANCE_S = 2.0
"""A survivor's error may come this much after the timeout."""
ENDLESS = 10**9
AFTER = 5
"""Steps after a checkpoint by which a resumed run is compared with an uninterrupted one."""
BESIDE_EXCHANGES = (
    "rank 0's", "the order in which", "the exchange of a decision", "the exchanges that measure", "measured times",
    "checksums of all weights", "all ranks to call reset", "the norm of", "the optimizer's state",
)  # fmt: skip
"""How errors begin to name what is waited for where this is no exchange of gradients. All others name a bucket."""


class Failed(Exception):
    """The outcome was not the expected one."""


class NotStarted(Failed):
    """Ranks did not come to the step at which a fault may happen."""

    def __init__(self, step: int, outcomes: list[Outcome]) -> None:
        super().__init__(f"it did not come to step {step}: {outcomes}")
        self.told = all(map(_waited, outcomes))
        """All ranks raised that others did not answer within the timeout."""


def _waited(outcome: Outcome) -> bool:
    """Whether gradwire raised that others did not answer, or gloo in a collective of the script's own."""
    if outcome.kind == "raised":
        return re.search("gloo.*(Timed out|Connection closed by peer)", outcome.value) is not None
    return isinstance(outcome.value, End) and outcome.value.kind == "CommunicationError"


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


class Ranks:
    """Worlds that stay alive between trials; of one thread."""

    def __init__(self) -> None:
        self._kept: dict[int, World] = {}
        self._cluster: EmulatedCluster | None = None

    def run(self, size: int, function: Any, *arguments: Any) -> list[Any]:
        """What a function returned on every rank. Raises AssertionError for what else came."""
        world = self._kept.get(size)
        if world is None or not world.alive:
            world = self._kept[size] = World(size, 2 * TIMEOUT_S)
        try:
            return world.run(function, *arguments, deadline_s=60)
        except BaseException:
            self._kept.pop(size).close()
            raise

    def cluster(self) -> EmulatedCluster:
        """Two nodes, whose links are up."""
        if self._cluster is None:
            self._cluster = EmulatedCluster(2, inter="1gbit")
            self._cluster.__enter__()
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
        for world in self._kept.values():
            world.close()
        self._kept.clear()


@dataclass
class Notes:
    """What a trial found, beside whether it passed."""

    fired: str = ""
    """How the fault showed that it happened. A trial without this fails."""
    latency_s: float | None = None
    """From the fault to the last survivor's error."""
    compared: int = 0
    """How often a resumed run was equal to an uninterrupted one, on all ranks and bit for bit."""
    not_comparable: str = ""
    """Why it was not compared."""
    started_again: int = 0
    """How often ranks were started anew, since a busy machine kept some of them from their first step for the whole timeout, and
    all had told so. No fault had happened yet."""


class Stage:
    """One trial's ranks, job and folders."""

    def __init__(self, schedule: str, setting: str, seed: int, folder: str, ranks: Ranks) -> None:
        self.schedule, self.setting, self.seed = schedule, setting, seed
        self.chance = chance_of(seed, "trial")
        self.notes = Notes()
        self._folder, self._ranks, self._folders = Path(folder), ranks, 0
        self.size = {"hierarchical": 4, "large model": 2}.get(setting) or self.chance.choice([2, 2, 2, 3, 4])
        spec = self.chance.choice(specs_of(schedule, setting))
        self.job = Job(seed, schedule, setting, self.size, ENDLESS, self.new_folder(), spec)
        self.begin = 0
        """The step with which runs begin: auto has decided by then."""

    def new_folder(self) -> str:
        self._folders += 1
        folder = self._folder / str(self._folders)
        folder.mkdir()
        return str(folder)

    def decide(self) -> None:
        """Under auto, runs begin with a checkpoint of a run that has decided: before that, times choose the plan. Some trials
        have their fault while plans are tried; those are not comparable."""
        if self.schedule != "auto":
            return
        if self.chance.random() < 0.3:
            self.notes.not_comparable = "auto was still trying plans"
            return
        folder = self.new_folder()
        ends = self.kept(replace(self.job, folder=folder, steps=80, until_decided=True))
        expect(all(end.kind == "saved" for end in ends), f"auto did not decide: {ends}")
        self.job, self.begin = replace(self.job, begins=folder), ends[0].step

    # ---- ranks

    def cluster(self) -> EmulatedCluster:
        return self._ranks.cluster()

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """What a function returned on ranks that stay alive."""
        return self._ranks.run(self.size, function, *arguments)

    def kept(self, job: Job) -> list[End]:
        """Run a job on ranks that stay alive."""
        return self._ranks.run(self.size, train, job)

    @contextmanager
    def started(self, job: Job, places: Sequence[Place] | None = None, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
        """New ranks, each of which has done some steps."""
        for rank in range(self.size):
            job.progress(rank).unlink(missing_ok=True)  # of an earlier life
        first = self._last_checkpoint(job, ENDLESS)
        with World(self.size, timeout_s, places) as world:
            world.start(train, job)
            try:
                # DDP's own collectives are over after three steps
                self.wait_for(world, job, first + (3 if self.schedule == HOOK else 1))
            except NotStarted as failure:
                if self.notes.started_again or not failure.told:
                    raise
                self.notes.started_again += 1
            else:
                yield world
                return
        with self.started(job, places, timeout_s) as world:
            yield world

    def wait_for(self, world: World, job: Job, step: int) -> None:
        deadline = time.monotonic() + 30
        while min(Progress.read(job.progress(rank)) for rank in range(self.size)) < step:
            if time.monotonic() > deadline or not world.alive:
                raise NotStarted(step, world.collect(0.1))
            time.sleep(0.002)

    def signal(self, world: World, number: int, longest_s: float = 0.06) -> tuple[int, float]:
        """Send a signal to a rank at a moment; (rank, when)."""
        victim = self.chance.randrange(self.size)
        time.sleep(self.chance.uniform(0, longest_s))
        os.kill(pid_of(world, victim), number)
        self.notes.fired = f"signal {number}"
        return victim, time.monotonic()

    # ---- what must hold

    def told_in_time(self, world: World, victim: int | None, at: float) -> None:
        """All others raised within the timeout and the allowance, and named the rank. Without a victim, where it is the link that
        failed, all."""
        others = [rank for rank in range(self.size) if rank != victim]
        outcomes = world.collect(TIMEOUT_S + ALLOWANCE_S + 5, needed=others)
        latest = max(self.names(ended(outcomes[rank]), rank, victim).at for rank in others) - at
        expect(latest <= TIMEOUT_S + ALLOWANCE_S, f"the last error came after {latest:.1f} s")
        self.notes.latency_s = latest

    def failed_in_time(self, world: World, victim: int, at: float) -> None:
        """All others raised within two timeouts and the allowance, gradwire or the framework's own collectives.

        A rank may wait for its whole timeout in a broadcast of the framework's, and then in an exchange."""
        others = [rank for rank in range(self.size) if rank != victim]
        outcomes = world.collect(2 * TIMEOUT_S + ALLOWANCE_S + 3, needed=others)
        late = time.monotonic() - at
        for rank in others:
            outcome = outcomes[rank]
            raised = outcome.kind == "raised" or (outcome.kind == "returned" and outcome.value.kind.endswith("Error"))
            expect(raised, f"rank {rank} ended: {outcome}")
        expect(late <= 2 * TIMEOUT_S + ALLOWANCE_S, f"the last error came after {late:.1f} s")
        self.notes.latency_s = late

    def names(self, end: End, rank: int, victim: int | None) -> End:
        """A rank's error says for which rank it waited, and for which bucket if it waited for one."""
        expect(end.kind == "CommunicationError", f"rank {rank}: {end}")
        waited = re.search(rf"step \d+: rank {rank} waited for (.*?): (rank|all of)", end.words)
        expect(waited is not None, f"rank {rank} does not say what it waited for: {end.words}")
        what = waited[1] if waited is not None else ""
        expect("bucket " in what or what.startswith(BESIDE_EXCHANGES), f"rank {rank} names no bucket: {end.words}")
        blamed = re.findall(r"ranks? ([\d, ]+?)(?= did not answer|, which may be busy)", end.words)
        found = victim is None or str(victim) in re.split(r", ", ", ".join(blamed))
        expect(found, f"rank {rank} does not blame {victim}: {end.words}")
        return end

    def in_time(self, ends: list[End]) -> None:
        slow = [f"{end.longest_s:.1f} s" for end in ends if end.longest_s > end.timeout_s + ALLOWANCE_S]
        expect(not slow, f"a step took {slow}: {ends}")

    def alike(self, ends: list[End]) -> None:
        """All finished, with the same weights."""
        expect(all(end.kind == "finished" for end in ends), f"not all finished: {ends}")
        expect(len({end.weights for end in ends}) == 1, f"weights differ: {ends}")
        self.in_time(ends)

    def resumes(self, job: Job, before: int = ENDLESS, like: list[End] | None = None) -> None:
        """A run that takes up the last checkpoint before a step ends as one that nothing interrupted: bit for bit, on every
        rank, what handles keep included. `like`: how that one ended, where it is known."""
        last = self._last_checkpoint(job, before)
        steps = job.steps if like else last + AFTER
        resumed = replace(self.job, folder=job.folder, steps=steps)
        if like is not None:
            expected, found = like, self.kept(resumed)
        else:
            pairs = self._ranks.run(self.size, train_twice, replace(resumed, folder=self.new_folder()), resumed)
            expected, found = [one for one, _ in pairs], [other for _, other in pairs]
        self.alike(found)
        torn = [end.torn for end in found if end.torn]
        expect(not torn, f"torn: {torn}")
        self.same(expected, found)

    def same(self, expected: list[End], found: list[End]) -> None:
        """Two runs ended alike, bit for bit; under auto if neither has decided in between, since times decide then."""
        if self.schedule == "auto" and any(end.decided for end in [*expected, *found]):
            self.notes.not_comparable = self.notes.not_comparable or "auto decided again"
        if self.notes.not_comparable:
            return
        alike = [(end.weights, end.whole) for end in expected] == [(end.weights, end.whole) for end in found]
        expect(alike, f"it ends otherwise: {found}, expected {expected}")
        self.notes.compared += 1

    def _last_checkpoint(self, job: Job, before: int) -> int:
        """The step of the newest that all ranks have; newer ones of the folder are removed."""
        of_ranks = []
        for rank in range(self.size):
            paths = {int(p.stem.rpartition("step")[2]): p for p in Path(job.folder).glob(f"rank{rank}-step*.pt")}
            for step in [step for step in paths if step >= before]:
                paths.pop(step).unlink()
            of_ranks.append(set(paths))
        return max(set.intersection(*of_ranks), default=self.begin)


def ended(outcome: Outcome) -> End:
    """What a rank returned; that it did not return is a failure."""
    expect(outcome.kind == "returned", f"a rank {outcome.kind}: {outcome.value}")
    end = outcome.value
    assert isinstance(end, End)
    return end


def pid_of(world: World, rank: int) -> int:
    pid = world.processes[rank].pid
    assert pid is not None
    return pid


def setting_of(schedule: str, seed: int) -> str:
    """What stands beside the schedule in a trial: half of the time nothing, and now and then a large model. Connections of some
    frameworks are encrypted."""
    chance = chance_of(seed, "setting")
    if schedule in INTEGRATIONS:
        return "encrypted" if chance.random() < 0.25 else "plain"
    if chance.random() < 0.5:
        return "plain"
    others = [setting for setting in settings_of(schedule) if setting not in ("plain", "large model")]
    return "large model" if chance.random() < 0.04 else chance.choice(others)
