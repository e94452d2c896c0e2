"""Faults that need real links: an emulated cluster, ranks as processes of their own in its network namespaces."""

import os
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gradwire import testbed
from soak.training import Progress, job_of
from soak.trials import ALLOWANCE_S, KINDS, Failed, expect

STEPS = 60
TESTS = Path(__file__).resolve().parents[1]


def link_lost(chance: random.Random, seed: int, folder: str) -> None:
    """A link is down for longer than the timeout: all ranks are told in time."""
    timeout_s = 4.0
    with testbed.EmulatedCluster(2, inter="1gbit") as cluster:
        run = Run(cluster, folder, seed, timeout_s, steps=10**9)
        run.wait_for_step(2)
        time.sleep(chance.uniform(0, 0.3))
        down_at = time.monotonic()
        cluster.set_link(chance.randrange(2), up=False)
        run.join(timeout_s + ALLOWANCE_S + 20)
    for rank in range(2):
        kind, _, words, at = run.ends[rank]
        expect(kind == "CommunicationError" and re.search(r"bucket \d+", words) is not None, f"{kind} {words}")
        expect(at - down_at < timeout_s + ALLOWANCE_S, f"rank {rank} was told after {at - down_at:.1f} s")


def link_flaps(chance: random.Random, seed: int, folder: str) -> None:
    """A link is down for a moment and comes back: nothing is lost."""
    expected = alone(seed)
    with testbed.EmulatedCluster(2, inter="1gbit") as cluster:
        run = Run(cluster, folder, seed, timeout_s=30.0, steps=STEPS)
        for _ in range(2):
            run.wait_for_step(2)
            node = chance.randrange(2)
            cluster.set_link(node, up=False)
            time.sleep(chance.uniform(0.1, 0.8))
            cluster.set_link(node, up=True)
        run.join(90)
    run.expect_digests(expected)


def torchrun_restarts(chance: random.Random, seed: int, folder: str) -> None:
    """A rank is killed under torchrun --max-restarts: all begin again from checkpoints and end as if nothing had been."""
    expected = alone(seed)
    with testbed.EmulatedCluster(2, inter="1gbit") as cluster:
        run = Run(cluster, folder, seed, timeout_s=30.0, steps=STEPS, elastic=True)
        run.join(150)
    run.expect_digests(expected)
    expect((Path(folder) / "died").exists(), "no rank was killed")


KINDS |= {"link lost": link_lost, "link flaps": link_flaps, "torchrun restarts": torchrun_restarts}


class Run:
    """Ranks on a cluster, in a thread."""

    def __init__(
        self,
        cluster: testbed.EmulatedCluster,
        folder: str,
        seed: int,
        timeout_s: float,
        steps: int,
        elastic: bool = False,
    ) -> None:
        self.ends: dict[int, tuple[str, str, str, float]] = {}
        self._lines: list[str] = []
        self._job, self._size = job_of(seed, folder), cluster.nodes
        script = [str(TESTS / "soak" / "rank.py"), folder, str(seed), str(timeout_s), str(steps)]
        if elastic:
            script = [str(TESTS / "soak" / "elastic.py"), str(cluster.nodes), *script, "suicidal"]
        paths = [str(TESTS), str(TESTS / "support"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        self._thread = threading.Thread(
            target=cluster.supervise, args=([sys.executable, "-u", *script],), daemon=True,
            kwargs={"env": environment, "on_line": self._line, "timeout": 180.0},
        )  # fmt: skip
        self._thread.start()

    def wait_for_step(self, step: int) -> None:
        """Until every rank has done so many steps more than now."""
        begin = [Progress.read(self._job.progress(rank)) for rank in range(self._size)]
        deadline = time.monotonic() + 60
        while any(Progress.read(self._job.progress(rank)) < max(0, begin[rank]) + step for rank in range(self._size)):
            if not self._thread.is_alive():
                return
            if time.monotonic() > deadline:
                raise Failed("the ranks do not go on: " + "\n".join(self._lines[-20:]))
            time.sleep(0.005)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        expect(not self._thread.is_alive(), f"no end after {timeout_s} s: " + "\n".join(self._lines[-20:]))
        expect(len(self.ends) == self._size, "not all ranks ended in words: " + "\n".join(self._lines[-20:]))

    def expect_digests(self, expected: list[str]) -> None:
        found = [self.ends[rank][1] for rank in range(self._size)]
        expect(found == expected, f"not as without the fault: {self.ends}")

    def _line(self, rank: int, stream: str, line: str) -> None:
        self._lines.append(line)
        if (match := re.search(r"END (\d+) (\w+) (\S*) (.*)", line)) is not None:
            self.ends[int(match[1])] = (match[2], match[3], match[4], time.monotonic())


def alone(seed: int) -> list[str]:
    """The digests of a run without a fault, on loopback: links do not change the sums."""
    from soak.trials import undisturbed

    with tempfile.TemporaryDirectory() as folder:
        return undisturbed(2, job_of(seed, folder, steps=STEPS))


def possible() -> bool:
    """Whether clusters can be emulated here."""
    from gradwire.testbed.namespaces import needs_user_namespace, permission_problem

    return os.name == "posix" and permission_problem() is None and not needs_user_namespace()


def namespaces_left() -> list[Any]:
    """Of this program's clusters."""
    from gradwire.testbed import namespaces

    return list(namespaces.existing(f"gradwire-{namespaces.this_owner()}-"))
