"""`gradwire emulate`: any torchrun script on an emulated cluster."""

import os
import sys
from pathlib import Path

from gradwire.errors import TestbedError
from gradwire.testbed.cluster import EmulatedCluster


def emulate(nodes: int, ranks_per_node: int, inter: str | None, intra: str | None, command: list[str]) -> int:
    """Run `command` (`script.py args` or `-m module args`) on every rank of a new cluster. Returns the exit code.

    The code is 0, or that of the first failed rank: 128 + signal for a rank that a signal ended. Users other than root call
    `reexec_in_user_namespace_if_needed` first. Raises TestbedError.
    """
    argv = [sys.executable, "-u", *_checked(command)]
    try:
        with EmulatedCluster(nodes, ranks_per_node, inter, intra) as cluster:
            return cluster.supervise(argv).code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as in `gradwire emulate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _checked(command: list[str]) -> list[str]:
    if not command:
        raise TestbedError("no script was given. Add it after `--`: gradwire emulate --nodes 2 -- train.py --epochs 1")
    if command[0] in ("-m", "-c"):
        if len(command) < 2:
            raise TestbedError(
                f"nothing follows {command[0]}. Write, for example: gradwire emulate -- -m package.train"
            )
        return command
    if not Path(command[0]).exists():
        raise TestbedError(
            f"the script {command[0]!r} does not exist in {Path.cwd()}. Begin the command with the script or with "
            "`-m module`, without `python` or `torchrun`."
        )
    return command
