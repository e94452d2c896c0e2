"""Forked interpreters of the tests do what started ones do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import Interpreters

LOOK = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread that was waited for"))).start()
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.getppid(), sorted(os.listdir("/proc/self/fd")))
print(os.environ["MARK"], os.environ.get("PATH"), os.getsid(0) == os.getpid(), sys.stdin.read(), sys.path[1:])
"""
ENDS = {
    "returns": "",
    "raises": "raise ValueError('as ordered')",
    "exits": "sys.exit(7)",
    "exits with words": "sys.exit('as ordered')",
    "is killed": "os.kill(os.getpid(), 9)",
    "is interrupted": f"os.kill(os.getpid(), {int(signal.SIGINT)})",
}


@pytest.mark.parametrize("way", ["script", "-m", "-c"])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_sees_and_leaves_the_same(interpreters: Interpreters, tmp_path: Path, way: str, end: str) -> None:
    program = LOOK + ENDS[end]
    path = tmp_path / "looks.py"
    path.write_text(program)
    words = {"script": [str(path)], "-m": ["-m", "looks"], "-c": ["-c", program]}[way]
    environment = {
        "MARK": "a mark",
        "PYTHONPATH": f"{tmp_path}:/somewhere",
        "PATH": "/nowhere",
        "PYTHONUNBUFFERED": "1",
    }
    seen = []
    for start in (subprocess.Popen, interpreters.start):
        process = start(
            [sys.executable, *words, "two words"],
            cwd=tmp_path,
            env=environment,
            start_new_session=end == "exits",
            text=True,
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        )
        out, err = process.communicate("given\n", timeout=60)
        seen.append((out, err.splitlines()[-1:], process.returncode))
    assert seen[0] == seen[1]
    assert str(os.getpid()) in seen[0][0]
