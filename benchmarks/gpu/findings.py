"""Findings: lines of JSON, each appended to the file as soon as it is known. A run that is killed leaves those before it."""

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

PASSED, NEAR, DIFFERS, FAILED = "passed", "near", "differs", "failed"
"""Outcomes of a comparison or a test. Near: floats were added up in another order."""
SKIPPED, MEASURED, ABORTED = "skipped", "measured", "aborted"
"""Other outcomes: what a device cannot do; a number that nothing is compared with; a section that did not end well."""
MESSAGE = 1500
"""So many characters of an error's message, and of its traceback, are kept."""
PRINTED = 6000
"""So many characters of what a process printed last are kept."""


class Job(NamedTuple):
    """One section of one run. Its processes get it as JSON."""

    section: str
    file: str
    run: str
    """When the run began: the same in all its findings."""
    device: str
    """cuda or cpu; a run on cpu has small sizes."""
    megabytes: tuple[int, ...]
    until: float
    """When the section's time ends, as `time.time()`."""

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def left(self) -> float:
        """Seconds until the section is ended."""
        return self.until - time.time()

    def to_json(self) -> str:
        return json.dumps(self)

    @staticmethod
    def from_json(text: str) -> "Job":
        section, file, run, device, megabytes, until = json.loads(text)
        return Job(section, file, run, device, tuple(megabytes), until)

    def write(self, what: str, outcome: str, **found: Any) -> None:
        """Append one finding. Processes may write at the same time: the system appends each line as a whole."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = {"section": self.section, "run": self.run, "at": now, "what": what, "outcome": outcome, **found}
        line = (json.dumps(row, default=str) + "\n").encode()
        file = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Make a finding of an error, and go on after it."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:MESSAGE]
            self.write(what, FAILED, error=message, trace=traceback.format_exc()[-MESSAGE:])


def mend(file: Path) -> None:
    """Cut off a line without an end, which a machine that failed may have left."""
    if file.exists():
        text = file.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(file, whole)


def rows_of(file: str, run: str, section: str | None = None) -> list[dict[str, Any]]:
    """The findings of a run, and of one section of it."""
    if not Path(file).exists():
        return []
    rows = (json.loads(line) for line in Path(file).read_text().splitlines())
    return [row for row in rows if row["run"] == run and section in (None, row["section"])]


PARENT = "GRADWIRE_GPU_PARENT"
"""The variable with the id of the process that starts another one."""


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends. A killed run leaves no process on the device."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if str(os.getppid()) != os.environ.get(PARENT, str(os.getppid())):
        os._exit(1)  # the parent ended while this process loaded its modules


def end_by(until: float) -> None:
    """Print the stacks of all threads shortly before a time, and end this process after the time, whatever its parent does."""
    left = max(2.0, until - time.time())
    faulthandler.dump_traceback_later(left - 1, file=os.dup(2))  # a copy, since pytest redirects standard error
    signal.alarm(int(left) + 5)


def last_printed(output: IO[bytes]) -> str:
    """The end of what a process printed into a file."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * PRINTED))
    return output.read().decode(errors="replace").strip()[-PRINTED:]


def killed_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a session, and all processes of the session that run."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
