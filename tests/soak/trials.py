"""The faults. Each is injected into real ranks on loopback and has an outcome that must come in time."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from soak.injected import HOOKS
from soak.settings import HOOK, QUANTISED, Fault, Job
from soak.stage import ALLOWANCE_S, ENDLESS, TIMEOUT_S, Failed, Ranks, Stage, ended, expect, pid_of, setting_of
from soak.training import Progress


@dataclass(frozen=True)
class Trial:
    """What one fault led to."""

    kind: str
    schedule: str
    setting: str
    seed: int
    passed: bool
    seconds: float
    detail: str
    """What failed, or how it ended where there are several ways."""
    fired: str
    latency_s: float | None
    compared: int
    not_comparable: str
    started_again: int


def run(kind: str, schedule: str, seed: int, ranks: Ranks, setting: str = "") -> Trial:
    """One trial; its failure is in the result."""
    began, setting = time.monotonic(), setting or setting_of(schedule, seed)
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as folder:
        stage = Stage(schedule, setting, seed, folder, ranks)
        try:
            passed, detail = True, KINDS[kind](stage) or ""
            expect(bool(stage.notes.fired), "the fault never happened")
        except (Failed, AssertionError, TimeoutError) as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        notes = stage.notes
    seconds = time.monotonic() - began
    return Trial(
        kind, schedule, setting, seed, passed, seconds, detail, notes.fired, notes.latency_s, notes.compared,
        notes.not_comparable, notes.started_again,
    )  # fmt: skip


# ---- from outside


def killed(stage: Stage) -> None:
    """SIGKILL: the others name bucket, step and rank in time, and a restart loses nothing."""
    stage.decide()
    job = replace(stage.job, checkpoint_every=stage.chance.randint(2, 6))
    with stage.started(job) as world:
        victim, at = stage.signal(world, signal.SIGKILL)
        stage.told_in_time(world, victim, at)
    stage.resumes(job)


def stopped(stage: Stage) -> None:
    """SIGSTOP for longer than the timeout: the same, and the rank itself ends in an error when it wakes."""
    stage.decide()
    job = replace(stage.job, checkpoint_every=stage.chance.randint(2, 6))
    with stage.started(job) as world:
        victim, at = stage.signal(world, signal.SIGSTOP)
        stage.told_in_time(world, victim, at)
        os.kill(pid_of(world, victim), signal.SIGCONT)
        outcome = world.collect(TIMEOUT_S + ALLOWANCE_S + 3, needed=[victim])[victim]
        failed = outcome.kind == "raised" if stage.schedule == HOOK else ended(outcome).kind not in ("finished", "saved")
        expect(failed or ended(outcome).kind == "CommunicationError", f"the rank that was stopped ended: {outcome}")
    stage.resumes(job)


def paused(stage: Stage) -> None:
    """SIGSTOP for a moment: nothing is lost, and the run ends as one that was not disturbed."""
    stage.decide()
    steps = stage.begin + 60
    job = replace(stage.job, steps=steps, checkpoint_every=40)
    with stage.started(job) as world:
        victim, _ = stage.signal(world, signal.SIGSTOP, longest_s=0.05)
        expect(Progress.read(job.progress(victim)) < steps, "the run was over before the fault")
        time.sleep(stage.chance.uniform(0.05, 0.3 * TIMEOUT_S))
        os.kill(pid_of(world, victim), signal.SIGCONT)
        ends = [ended(outcome) for outcome in world.collect(60)]
    stage.alike(ends)
    stage.resumes(job, before=steps, like=ends)
    if not stage.notes.not_comparable:
        stage.same(ends, stage.kept(replace(job, folder=stage.new_folder(), checkpoint_every=0)))


def restarted(stage: Stage) -> None:
    """SIGKILL again and again, each time followed by a start from checkpoints: the run ends where an undisturbed run ends."""
    stage.decide()
    job = replace(stage.job, checkpoint_every=stage.chance.randint(2, 5))
    for _ in range(2):
        with stage.started(job) as world:
            victim, at = stage.signal(world, signal.SIGKILL)
            stage.told_in_time(world, victim, at)
    stage.resumes(job)


def terminated(stage: Stage) -> None:
    """SIGTERM to one rank, as before a machine is taken away: all save at the same step and end, and a restart loses nothing."""
    stage.decide()
    job = replace(stage.job, saves_on_sigterm=True)
    with stage.started(job) as world:
        stage.signal(world, signal.SIGTERM)
        ends = [ended(outcome) for outcome in world.collect(TIMEOUT_S + ALLOWANCE_S)]
    expect(all(end.kind == "saved" for end in ends), f"{ends}")
    expect(len({(end.step, end.weights) for end in ends}) == 1, f"saved at different steps: {ends}")
    stage.in_time(ends)
    stage.resumes(job)


def disk_full(stage: Stage) -> None:
    """A rank's disk is full during checkpoints, then a rank is killed: resuming from older ones loses nothing."""
    stage.decide()
    victim, full_from = stage.chance.randrange(stage.size), stage.begin + stage.chance.randint(4, 12)
    with small_disk(stage.new_folder()) as small:
        job = replace(stage.job, checkpoint_every=3, full_disk=(victim, full_from, small))
        with stage.started(job) as world:
            stage.wait_for(world, job, full_from + 6)
            killed, at = stage.signal(world, signal.SIGKILL)
            stage.told_in_time(world, killed, at)
        # the rank may have been killed while it wrote one
        left = list(Path(small).iterdir()) if Path(small).is_dir() else []
        expect(len(left) <= (killed == victim), f"parts of checkpoints were left: {left}")
    saved = [int(path.stem.rpartition("step")[2]) for path in Path(job.folder).glob(f"rank{victim}-step*.pt")]
    expect(max(saved, default=0) < full_from, f"the disk was not full: {saved}, full from {full_from}")
    stage.resumes(job)


# ---- inside a rank


def odd_one(stage: Stage) -> str:
    """After a restart one rank has another model, plan, version or dtype: all are told before anything is sent. Another seed
    is none, and the right ranks go on from the checkpoints."""
    stage.decide()
    whats = ["model", "plan", "version", "seed"] if stage.schedule != HOOK else ["plan", "version", "seed"]
    what = stage.chance.choice(whats)
    job = replace(stage.job, steps=stage.begin + 7, checkpoint_every=3)
    stage.alike(stage.kept(job))
    odd = (stage.chance.randrange(stage.size), what)
    ends = stage.kept(replace(job, folder=stage.new_folder(), odd=odd))
    if what == "seed":
        stage.alike(ends)
    else:
        expect(all(end.kind == "DisagreementError" for end in ends), f"{what}: {ends}")
        expect(len({end.words for end in ends}) == 1, f"not all were told the same: {ends}")
        expect(all(end.step <= stage.begin for end in ends), f"a step was made: {ends}")
    stage.notes.fired = f"odd {what}"
    stage.resumes(job, before=stage.begin + 7)
    return what


def raised(stage: Stage) -> str:
    """A rank's backward raises: where the script catches it the step is void on all, and all stay the same."""
    return raising(stage, "raised", "", must_go_on=True)


def hook_raised(stage: Stage) -> str:
    """A hook of the script raises on one rank, of any kind that torch has in a step."""
    # the sharded schedule refuses an optimizer with step hooks
    variant = stage.chance.choice([each for each in HOOKS if stage.schedule != "sharded" or "step" not in each])
    return f"{variant}: {raising(stage, 'hook raised', variant)}"


def short_memory(stage: Stage) -> str:
    """MemoryError at a line of gradwire's part of a step: an error on all ranks, or a step that nobody counts."""
    return raising(stage, "short memory", "")


def raising(stage: Stage, kind: str, variant: str, must_go_on: bool = False) -> str:
    """All go on alike, or all end in an error, in time; what was saved resumes."""
    stage.decide()
    chance, steps = stage.chance, stage.begin + 16
    caught = stage.schedule != HOOK and chance.random() < 0.8
    fault = Fault(kind, chance.randrange(stage.size), stage.begin + chance.randint(3, 9), variant, chance.random(), caught)
    every = 5 if steps % 5 else 6
    job = replace(stage.job, steps=steps, checkpoint_every=every, drift_check_steps=2, fault=fault)
    if not caught:
        return uncaught(stage, replace(job, steps=ENDLESS), fault)
    ends = stage.kept(job)
    stage.notes.fired = ", ".join(ends[fault.rank].fired)
    if all(end.kind == "finished" for end in ends):
        stage.alike(ends)
        stage.resumes(job, before=steps, like=ends)
        return "went on"
    stage.in_time(ends)
    expect(not must_go_on and all(end.kind not in ("finished", "saved") for end in ends), f"not all alike: {ends}")
    stage.resumes(job, before=fault.step + 1)
    return "all told"


def uncaught(stage: Stage, job: Job, fault: Fault) -> str:
    """The process of the rank ends, as a script's does: the others name it in time. Or all are told before that."""
    with stage.started(job) as world:
        outcomes = world.collect(30)
    died = outcomes[fault.rank].kind == "died"
    ends = [ended(each) for rank, each in enumerate(outcomes) if not (died and rank == fault.rank)]
    if died:
        expect(outcomes[fault.rank].value == "exit code 1", f"rank {fault.rank}: {outcomes[fault.rank].value}")
        stage.notes.fired = "its process ended"
        for rank, end in zip((rank for rank in range(stage.size) if rank != fault.rank), ends, strict=True):
            stage.names(end, rank, fault.rank)
    else:
        stage.notes.fired = ", ".join(ends[fault.rank].fired)
        expect(all(end.kind not in ("finished", "saved") for end in ends), f"{ends}")
    stage.in_time(ends)
    stage.resumes(job, before=fault.step + 1)
    return "its process ended" if died else "all told"


def corrupted(stage: Stage) -> str:
    """A bit flips in a message to one rank, on TCP: all are told in the same step, and who sent it to whom."""
    chance = stage.chance
    stage.job = replace(stage.job, shared_memory=False)
    if stage.schedule != "sharded":
        stage.job = replace(stage.job, spec=chance.choice(QUANTISED))
    if stage.schedule == "auto":  # a plan that encodes is certain only while it begins
        stage.notes.not_comparable = "auto was still trying plans"
    # the hook makes its exchange anew after the second step
    first = 1 if stage.schedule == "auto" else chance.randint(4 if stage.schedule == HOOK else 2, 8)
    fault = Fault("corrupted", chance.randrange(stage.size), first, draw=chance.random())
    # narrow residuals: wires carry nothing then; encrypted: no bit flips before it is encrypted, but on a wire
    by_python = chance.random() < 0.5 or stage.setting in ("narrow residuals", "encrypted")
    stage.job = replace(
        stage.job, by_python=by_python
    )  # both add up uncompressed sums of more than two ranks in orders of their own
    job = replace(stage.job, steps=30, checkpoint_every=2, drift_check_steps=5, fault=fault)
    ends = stage.kept(job)
    stage.notes.fired = ", ".join(ends[fault.rank].fired)
    expect(all(end.kind == "CommunicationError" for end in ends), f"not all were told: {ends}")
    # where the bit was in what comes before a payload, ranks may as well have run different plans, or bytes never come
    expect(
        any(re.search("changed on their way|the network changed bytes|Timed out", end.words) for end in ends),
        f"other words: {ends}",
    )
    steps = {step for end in ends for step in re.findall(r"step (\d+): bytes of", end.words)}
    expect(len(steps) <= 1, f"in different steps: {ends}")
    stage.in_time(ends)
    stage.resumes(job)
    return stage.notes.fired


def uneven(stage: Stage) -> None:
    """Loops of different length inside join(): all end with the same weights."""
    stage.job = replace(stage.job, stateless=True)
    stage.decide()
    counts = [stage.chance.randint(0, 6) for _ in range(stage.size)]
    counts[stage.chance.randrange(stage.size)] = max(counts) + 3
    job = replace(stage.job, batches=tuple(counts), steps=stage.begin + max(counts) + 6)
    ends = stage.kept(job)
    stage.notes.fired = f"{min(counts)} to {max(counts)} batches"
    stage.alike(ends)
    stage.resumes(job, before=job.steps, like=ends)


def strangers(stage: Stage) -> None:
    """Strangers call every port of every rank before ranks connect and while they train, and stay: nothing is lost."""
    stage.decide()
    steps = stage.begin + 12
    job = replace(stage.job, steps=steps, checkpoint_every=5, strangers=True)
    ends = stage.kept(job)
    stage.notes.fired = ", ".join(dict.fromkeys(each for end in ends for each in end.fired))
    stage.alike(ends)
    stage.resumes(job, before=steps, like=ends)


KINDS: dict[str, Callable[[Stage], str | None]] = {
    "killed": killed,
    "stopped": stopped,
    "paused": paused,
    "restarted": restarted,
    "terminated": terminated,
    "disk full": disk_full,
    "odd one": odd_one,
    "raised": raised,
    "hook raised": hook_raised,
    "short memory": short_memory,
    "corrupted": corrupted,
    "uneven": uneven,
    "strangers": strangers,
}

LEFT_OUT: dict[tuple[str, str], str] = {
    ("uneven", "sharded"): "join() refuses it: a rank without a batch has a shard that only it can step",
}
"""Pairs of a kind and a schedule that make no sense, and why."""


@contextmanager
def small_disk(folder: str) -> Iterator[str]:
    """A folder on a disk with 4 KiB of room, which a checkpoint does not fit in."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True).returncode:
        yield "/dev/full"  # not allowed to mount: every write there fails in the same way
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
