"""Runs scripts to their ends: on two ranks each, all at once, in interpreters that end as those of torchrun do."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from interpreters import Interpreters

from gradwire.testbed.supervisor import free_port

__all__ = ["End", "ends_of", "rank_environments", "run_ranks"]

End = dict[str, Any]
"""exit: the exit code, or None if the rank was killed at the deadline; seconds: from an interrupt to the end; left: processes
left behind; out, err: what was printed."""

DEADLINE_S = 40.0


def rank_environments() -> list[dict[str, str]]:
    """The environment of each of two ranks, with the variables that torchrun sets and a port that is free."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"GROUP_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def run_ranks(
    interpreters: Interpreters, script: Path, timeout: float = 240.0, **variables: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Run a script on two ranks in its folder, with these variables too. As under torchrun, a rank that fails ends the other."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    ranks = [
        interpreters.start([sys.executable, script], cwd=script.parent, env=environment | variables, text=True, **pipes)
        for environment in rank_environments()
    ]

    def finish(rank: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
        try:
            out, err = rank.communicate(timeout=timeout)
        finally:
            if rank.returncode != 0:
                for each in ranks:
                    each.kill()
        return subprocess.CompletedProcess(rank.args, rank.returncode, out, err)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(finish, ranks))


def ends_of(interpreters: Interpreters, script: str, arguments: list[str], folder: Path) -> dict[str, End]:
    """Return the end of "ARGUMENT.RANK" for every argument with which the script runs. The script is in the folder.

    A rank that prints a line "interrupt me" gets SIGINT, with the processes it made, as from a terminal, once both of its ranks
    have printed it.
    """
    (path := folder / "train.py").write_text(script)
    ranks = {}
    for argument in arguments:
        for rank, environment in enumerate(rank_environments()):
            name = f"{argument}.{rank}"
            with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
                files = {"stdout": out, "stderr": err, "start_new_session": True}
                ranks[name] = interpreters.start([sys.executable, path, argument], env=environment, **files)
    ends = _watch(folder, ranks)
    for name, end in ends.items():
        end["out"], end["err"] = ((folder / f"{name}.{suffix}").read_text() for suffix in ("out", "err"))
    return ends


def _watch(folder: Path, ranks: "dict[str, subprocess.Popen[Any]]") -> dict[str, End]:
    """Wait for every rank and return its end. Ranks that still run at the deadline are killed."""
    ends: dict[str, End] = {}
    interrupted: dict[str, float] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ends) < len(ranks) and time.monotonic() < deadline:
        ready = {name for name in ranks if "interrupt me" in (folder / f"{name}.out").read_text()}
        for name in sorted(ready - interrupted.keys()):
            if {f"{name[:-1]}{rank}" for rank in range(2)} <= ready:
                time.sleep(0.1)  # the line is printed a moment before what it announces
                os.killpg(ranks[name].pid, signal.SIGINT)
                interrupted[name] = time.monotonic()
        for name in ranks.keys() - ends.keys():
            if (code := ranks[name].poll()) is not None:
                seconds = time.monotonic() - interrupted[name] if name in interrupted else None
                ends[name] = {"exit": code, "seconds": seconds}
        time.sleep(0.02)
    time.sleep(0.5)
    for name, process in ranks.items():
        ends.setdefault(name, {"exit": None, "seconds": None})["left"] = _left_in(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ends


def _left_in(session: int) -> list[str]:
    """The command lines of the processes of a session, zombies not counted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]  # state, parent, group, session
            if int(of) == session and state != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
