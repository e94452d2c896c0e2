"""The faults. Each is injected into a world of real ranks on loopback and has an outcome that must come in time."""

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from worlds import Outcome, World

from soak.training import End, Job, Progress, job_of, train

TIMEOUT_S = 5.0
"""Of the process group."""
ALLOWANCE_S = 2.0
"""A survivor's error may come this much after the timeout."""
ENDLESS = 10**9


@dataclass(frozen=True)
class Trial:
    """What one fault led to."""

    kind: str
    seed: int
    passed: bool
    seconds: float
    detail: str
    latency_s: float | None = None
    """From the fault to the last survivor's error."""


class Failed(Exception):
    """The outcome was not the expected one."""


def run(kind: str, seed: int) -> Trial:
    """One trial; its failure is in the result."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as folder:
        try:
            found = KINDS[kind](random.Random(seed), seed, folder)
            latency, detail = (found, "") if isinstance(found, float) else (None, found or "")
            return Trial(kind, seed, True, time.monotonic() - started, detail, latency)
        except (Failed, AssertionError, TimeoutError) as error:
            return Trial(kind, seed, False, time.monotonic() - started, f"{type(error).__name__}: {error}")


# ---- kinds


def killed(chance: random.Random, seed: int, folder: str) -> float:
    """SIGKILL: the others name bucket, step and rank in time."""
    with started(chance, job_of(seed, folder, steps=ENDLESS)) as world:
        victim, at = signalled(world, chance, signal.SIGKILL)
        return told_in_time(world, victim, at)


def stopped(chance: random.Random, seed: int, folder: str) -> float:
    """SIGSTOP for longer than the timeout: the same, and the rank itself ends in an error when it wakes."""
    with started(chance, job_of(seed, folder, steps=ENDLESS)) as world:
        victim, at = signalled(world, chance, signal.SIGSTOP)
        latency = told_in_time(world, victim, at)
        os.kill(pid_of(world, victim), signal.SIGCONT)
        outcome = world.collect(TIMEOUT_S + ALLOWANCE_S + 3, needed=[victim])[victim]
        expect(ended(outcome).kind != "finished", f"the rank that was stopped ended: {outcome}")
        return latency


def paused(chance: random.Random, seed: int, folder: str) -> None:
    """SIGSTOP for a moment: nothing is lost, and the run ends as one that was not disturbed."""
    size, job = chance.randint(2, 4), job_of(seed, folder, steps=60)
    expected = undisturbed(size, job)
    with started(chance, job, size) as world:
        victim, _ = signalled(world, chance, signal.SIGSTOP, longest_s=0.05)
        time.sleep(chance.uniform(0.05, 0.4 * TIMEOUT_S))
        os.kill(pid_of(world, victim), signal.SIGCONT)
        same(world, expected)


def restarted(chance: random.Random, seed: int, folder: str) -> None:
    """SIGKILL, and all begin again from their checkpoints: they end where an undisturbed run ends."""
    size, job = chance.randint(2, 3), job_of(seed, folder, steps=60, checkpoint_every=chance.randint(3, 9))
    with tempfile.TemporaryDirectory() as elsewhere:
        expected = undisturbed(size, job_of(seed, elsewhere, steps=60, checkpoint_every=0))
    for _ in range(chance.randint(1, 2)):
        with started(chance, job, size) as world:
            signalled(world, chance, signal.SIGKILL, longest_s=0.1)
            world.collect(TIMEOUT_S + ALLOWANCE_S + 3)
    with World(size, TIMEOUT_S) as world:
        world.start(train, job)
        same(world, expected)


def odd_one(chance: random.Random, seed: int, folder: str) -> None:
    """One rank has another model, plan, version or dtype: all are told before anything is sent. Another seed is none."""
    what, size = chance.choice(["model", "plan", "version", "dtype", "seed"]), chance.randint(2, 4)
    job = job_of(seed, folder, steps=5, odd=(chance.randrange(size), what), plan="qsgd4")
    with World(size, TIMEOUT_S) as world:
        world.start(train, job)
        ends = [ended(outcome) for outcome in world.collect(20)]
    if what == "seed":
        expect(len({end.digest.partition(":")[0] for end in ends}) == 1, f"ranks differ: {ends}")
        expect(all(end.kind == "finished" for end in ends), f"{ends}")
        return
    expect(len({end.words for end in ends}) == 1, f"not all were told the same: {ends}")
    expect(all(end.kind == "DisagreementError" and end.step == -1 for end in ends), f"{what}: {ends}")


def raised(chance: random.Random, seed: int, folder: str) -> None:
    """A rank's backward raises and the script goes on: the step is void on all, and all stay the same."""
    steps = tuple(sorted(chance.sample(range(1, 30), 3)))
    size, job = chance.randint(2, 4), job_of(seed, folder, steps=30, raise_at=steps)
    with World(size, TIMEOUT_S) as world:
        world.start(train, job)
        alike(world, told=3)


def uneven(chance: random.Random, seed: int, folder: str) -> None:
    """Loops of different length inside join(): all end with the same weights."""
    size = chance.randint(2, 4)
    job = job_of(seed, folder, batches=tuple(chance.randint(0, 9) for _ in range(size)))
    with World(size, TIMEOUT_S) as world:
        world.start(train, job)
        alike(world)


def corrupted(chance: random.Random, seed: int, folder: str) -> str:
    """A bit flips in a message to one rank: all end with the same weights, or are told by the drift watch at the latest."""
    size = chance.randint(2, 3)
    job = job_of(seed, folder, steps=30, drift_check_steps=5, corrupt_at=chance.randint(1, 60), plan="qsgd4")
    with World(size, TIMEOUT_S) as world:
        world.start(train, job)
        ends = [ended(outcome) for outcome in world.collect(2 * TIMEOUT_S + ALLOWANCE_S + 10)]
    finished = [end for end in ends if end.kind == "finished"]
    expect(len(finished) in (0, size), f"some finished and some did not: {ends}")
    expect(len({end.digest.partition(":")[0] for end in finished}) <= 1, f"a silent difference: {ends}")
    return ", ".join(sorted({end.kind for end in ends}))


def disk_full(chance: random.Random, seed: int, folder: str) -> None:
    """A rank's disk is full during checkpoints, then a rank is killed: resuming from older ones loses nothing."""
    size, victim = chance.randint(2, 3), chance.randrange(2)
    with tempfile.TemporaryDirectory() as elsewhere:
        expected = undisturbed(size, job_of(seed, elsewhere, steps=60, sizes=(4096, 4096, 300), checkpoint_every=0))
    with small_disk(folder) as small:
        full = (victim, chance.randint(10, 30), small)
        job = job_of(seed, folder, steps=60, sizes=(4096, 4096, 300), checkpoint_every=5, full_disk=full)
        with started(chance, job, size) as world:
            deadline = time.monotonic() + 20
            while Progress.read(job.progress(victim)) < 40 and time.monotonic() < deadline:
                time.sleep(0.005)
            killed, _ = signalled(world, chance, signal.SIGKILL, longest_s=0.01)
            world.collect(TIMEOUT_S + ALLOWANCE_S + 3)
        parts = list(Path(small).iterdir())
        # the rank may have been killed while it wrote one
        expect(len(parts) <= (killed == victim), f"parts of checkpoints were left: {parts}")
        with World(size, TIMEOUT_S) as world:
            world.start(train, job)
            same(world, expected)


KINDS: dict[str, Callable[[random.Random, int, str], float | str | None]] = {
    "killed": killed,
    "stopped": stopped,
    "paused": paused,
    "restarted": restarted,
    "odd one": odd_one,
    "raised": raised,
    "uneven": uneven,
    "corrupted": corrupted,
    "disk full": disk_full,
}


# ---- what they share


@contextlib.contextmanager
def started(chance: random.Random, job: Job, size: int | None = None) -> Iterator[World]:
    """A world of this size, or one that chance decides, in which every rank has done a step."""
    with World(size or chance.randint(2, 4), TIMEOUT_S) as world:
        world.start(train, job)
        deadline = time.monotonic() + 30
        while min(Progress.read(job.progress(rank)) for rank in range(world.size)) < 1:
            if time.monotonic() > deadline:
                raise Failed(f"it did not begin: {world.collect(0.1)}")
            time.sleep(0.002)
        yield world


def signalled(world: World, chance: random.Random, number: int, longest_s: float = 0.3) -> tuple[int, float]:
    """Send a signal to a rank at a moment; (rank, when)."""
    victim = chance.randrange(world.size)
    time.sleep(chance.uniform(0, longest_s))
    os.kill(pid_of(world, victim), number)
    return victim, time.monotonic()


def told_in_time(world: World, victim: int, at: float) -> float:
    """All others raised, named bucket, step and rank, within the timeout and the allowance; how long the last took."""
    others = [rank for rank in range(world.size) if rank != victim]
    outcomes = world.collect(TIMEOUT_S + ALLOWANCE_S + 5, needed=others)
    latest = 0.0
    for rank in others:
        end = ended(outcomes[rank])
        expect(end.kind == "CommunicationError", f"rank {rank}: {end}")
        named = re.search(rf"step {end.step}: rank {rank} waited for .*bucket \d+.*?: ranks? (\d+)", end.words)
        expect(named is not None, f"rank {rank} did not name step {end.step}, bucket and rank: {end.words}")
        blamed = re.findall(r"ranks? ([\d, ]+?)(?= did not answer|, which may be busy)", end.words)
        expect(str(victim) in re.split(r", ", ", ".join(blamed)), f"rank {rank} does not blame {victim}: {end.words}")
        latest = max(latest, end.at - at)
    expect(latest <= TIMEOUT_S + ALLOWANCE_S, f"the last error came after {latest:.1f} s")
    return latest


def undisturbed(size: int, job: Job) -> list[str]:
    """The digests of a run without a fault."""
    with World(size, 60.0) as world:
        world.start(train, job)
        ends = [ended(outcome) for outcome in world.collect(60)]
    expect(all(end.kind == "finished" for end in ends), f"without a fault: {ends}")
    return [end.digest for end in ends]


def same(world: World, expected: list[str]) -> None:
    """All finish, and where a run without a fault does."""
    ends = [ended(outcome) for outcome in world.collect(60)]
    expect([end.digest for end in ends] == expected, f"not as without the fault: {ends}, expected {expected}")


def alike(world: World, told: int = 0) -> None:
    """All finish with the same weights."""
    ends = [ended(outcome) for outcome in world.collect(60)]
    expect(all(end.kind == "finished" and end.told == told for end in ends), f"{ends}")
    expect(len({end.digest.partition(":")[0] for end in ends}) == 1, f"weights differ: {ends}")


def ended(outcome: Outcome) -> End:
    """What a rank returned; that it did not return is a failure."""
    expect(outcome.kind == "returned", f"a rank {outcome.kind}: {outcome.value}")
    end = outcome.value
    assert isinstance(end, End)
    return end


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def pid_of(world: World, rank: int) -> int:
    pid = world.processes[rank].pid
    assert pid is not None
    return pid


@contextlib.contextmanager
def small_disk(folder: str) -> Iterator[str]:
    """A folder on a disk with 64 KiB of room, which a checkpoint does not fit in."""
    place = Path(folder) / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        yield "/dev/full"  # not allowed to mount: every write there fails in the same way
        return
    try:
        yield str(place)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
