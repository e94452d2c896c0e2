"""Runs scripts on two ranks each, all scripts at once, in interpreters that end as those of torchrun do.

    python interpreters.py FOLDER SCRIPT ARGUMENT...

runs `SCRIPT ARGUMENT` on two ranks for every argument. A rank that prints a line "interrupt me" gets SIGINT, with the
processes it made, as from a terminal, once both of its ranks have printed it. FOLDER/ends.json then holds for
"ARGUMENT.RANK" what became of it: exit code, seconds from the interrupt to the end, and the processes it left behind.
stdout and stderr are in FOLDER/ARGUMENT.RANK.out and .err.

Ranks are forked when torch is loaded, with the half of it that optimizers load when they are first used, so each takes
milliseconds to start; what runs at exit is what runs in a script.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # noqa: F401

import gradwire.engine  # noqa: F401
from gradwire.testbed.supervisor import free_port

DEADLINE_S = 40.0


def start(folder: Path, script: str, argument: str, rank: int, port: int) -> int | None:
    """The process id of the rank; None in the rank itself."""
    files = [os.open(folder / f"{argument}.{rank}.{suffix}", os.O_WRONLY | os.O_CREAT) for suffix in ("out", "err")]
    if pid := os.fork():
        for file in files:
            os.close(file)
        return pid
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell put the tests in the background
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [script, argument]
    return None


def left_in(session: int) -> list[str]:
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


def watch(folder: Path, ranks: dict[str, int]) -> dict[str, dict[str, object]]:
    """Wait for every rank and return its end. Ranks that still run at the deadline are killed and have no exit code."""
    ends: dict[str, dict[str, object]] = {}
    interrupted: dict[str, float] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ends) < len(ranks) and time.monotonic() < deadline:
        ready = {name for name in ranks if "interrupt me" in (folder / f"{name}.out").read_text()}
        for name in sorted(ready - interrupted.keys()):
            if {f"{name[:-1]}{rank}" for rank in range(2)} <= ready:
                time.sleep(0.1)  # the line is printed a moment before what it announces
                os.killpg(ranks[name], signal.SIGINT)
                interrupted[name] = time.monotonic()
        for name in ranks.keys() - ends.keys():
            pid, status = os.waitpid(ranks[name], os.WNOHANG)
            if pid:
                seconds = time.monotonic() - interrupted[name] if name in interrupted else None
                ends[name] = {"exit": os.waitstatus_to_exitcode(status), "seconds": seconds}
        time.sleep(0.02)
    time.sleep(0.5)
    for name, session in ranks.items():
        ends.setdefault(name, {"exit": None, "seconds": None})["left"] = left_in(session)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)
    return ends


def main() -> None:
    folder, script, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ranks = {}
    gc.freeze()  # otherwise every rank, when it ends, looks at the 300,000 objects of torch, and copies their memory
    for argument in arguments:
        port = free_port()
        for rank in range(2):
            pid = start(folder, script, argument, rank, port)
            if pid is None:
                runpy.run_path(script, run_name="__main__")
                return
            ranks[f"{argument}.{rank}"] = pid
    (folder / "ends.json").write_text(json.dumps(watch(folder, ranks)))


main()
