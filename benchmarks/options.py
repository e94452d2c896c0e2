"""All 174 options of one device on real ranks: 4 gloo processes as 2 nodes of 2, the whole tree as buckets of one plan.

    python -m benchmarks options

Exact without loss, within the error of their encodes with 4 bits, the same bits on all ranks; `tests/ranks/test_options_run.py`
runs a sample of it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import RESULTS, write
from gradwire.testbed.supervisor import free_port

RANKS, RANKS_PER_NODE = 4, 2
PROGRAM = Path(__file__).parents[1] / "tests" / "support" / "options.py"


def run(arguments: list[str]) -> int:
    """Start the ranks, print what is wrong and write benchmarks/results/options.json."""
    argparse.ArgumentParser(prog="python -m benchmarks options").parse_args(arguments)
    start, port = time.monotonic(), free_port()
    ranks = [subprocess.Popen([sys.executable, str(PROGRAM)], env=_environment(rank, port)) for rank in range(1, RANKS)]
    told = subprocess.run(
        [sys.executable, str(PROGRAM)], env=_environment(0, port), stdout=subprocess.PIPE, text=True, check=False
    )
    if any([told.returncode, *(rank.wait() for rank in ranks)]):
        return 1
    result = json.loads(told.stdout.splitlines()[-1]) | {"seconds": round(time.monotonic() - start, 1)}
    for problem in result["problems"]:
        print(problem)
    print(f"{result['options']} options, {result['runs']} runs in {result['seconds']} s: {len(result['problems'])} wrong")
    write(RESULTS / "options.json", result)
    return 1 if result["problems"] else 0


def _environment(rank: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": RANKS, "GROUP_RANK": rank // RANKS_PER_NODE, "LOCAL_WORLD_SIZE": RANKS_PER_NODE}
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return os.environ | words | {name: str(value) for name, value in own.items()}
