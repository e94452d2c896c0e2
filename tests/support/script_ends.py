"""Runs scripts to their ends: on ranks that start at once, in interpreters that end as those of torchrun do."""

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
ENDING_S = 5.0
"""For the processes that ranks leave behind at their end, in all."""


def rank_environments(ranks: int = 2) -> list[dict[str, str]]:
    """The environment of each rank, with the variables that torchrun sets and a port that is free."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    common |= {"GROUP_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run_ranks(
    interpreters: Interpreters, script: Path, *arguments: str, size: int = 2, timeout: float = 240.0, **variables: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Run a script on `size` ranks in its folder, with these variables too. A rank that fails ends the others."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, script, *arguments]
    ranks = [
        interpreters.start(command, cwd=script.parent, env=environment | variables, text=True, **pipes)
        for environment in rank_environments(size)
    ]

    def finish(rank: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
        try:
            out, err = rank.communicate(timeout=timeout)
        finally:
            if rank.returncode != 0:
                for each in ranks:
                    each.kill()
        return subprocess.CompletedProcess(rank.args, rank.returncode, out, err)

    with ThreadPoolExecutor(size) as pool:
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
    deadline = time.monotonic() + ENDING_S
    for name, process in ranks.items():
        while (left := _left_in(process.pid)) and ends.get(name) and time.monotonic() < deadline:
            time.sleep(0.05)
        ends.setdefault(name, {"exit": None, "seconds": None})["left"] = left
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
