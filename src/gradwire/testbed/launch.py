"""Tie this process to its supervisor, then become the rank: `python -I -S launch.py SUPERVISOR_PID PROGRAM ARGS...`.

A program of its own because code between fork and exec is not safe in a process with threads, as training drivers are.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGKILL at the supervisor's death, check that it has not died before the asking, and exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"gradwire: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("gradwire: the supervisor died before its rank began")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an ignored signal stays so across exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"gradwire: cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr)
        sys.exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main()
