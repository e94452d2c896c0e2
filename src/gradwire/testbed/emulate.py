"""`gradwire emulate`: any torchrun script on an emulated cluster."""

import os
import sys
from pathlib import Path

from gradwire.errors import TestbedError
from gradwire.testbed.cluster import EmulatedCluster
from gradwire.testbed.output import LineCallback


def emulate(
    nodes: int,
    ranks_per_node: int,
    inter: str | None,
    intra: str | None,
    command: list[str],
    *,
    on_line: LineCallback | None = None,
    timeout: float | None = None,
) -> int:
    """Run `command` (`script.py args` or `-m module args`) on every rank of a new cluster; the exit code for the shell.

    0, or the code of the first rank that failed, 128 + signal where a signal ended it, 124 after `timeout` seconds.
    Call `reexec_in_user_namespace_if_needed` first to serve users other than root. Raises TestbedError.
    """
    argv = [sys.executable, "-u", *_checked(command)]
    try:
        with EmulatedCluster(nodes, ranks_per_node, inter, intra) as cluster:
            return cluster.supervise(argv, on_line=on_line, timeout=timeout).code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as in `gradwire emulate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _checked(command: list[str]) -> list[str]:
    if not command:
        raise TestbedError(
            "no script was given. Write it after `--`: gradwire emulate --nodes 2 -- train.py --epochs 1"
        )
    if command[0] in ("-m", "-c"):
        if len(command) < 2:
            raise TestbedError(
                f"nothing follows {command[0]}. Write for example: gradwire emulate ... -- -m package.train"
            )
        return command
    if not Path(command[0]).exists():
        raise TestbedError(
            f"the script {command[0]!r} does not exist in {Path.cwd()}. The command begins with the script itself, "
            "without `python` or `torchrun`, or with `-m module`."
        )
    return command
