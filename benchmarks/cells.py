"""Measures step times: jobs x links x methods, DDP and gradwire, interleaved in one run per number of nodes.

    python -m benchmarks cells [--jobs transformer] [--nodes 2,4] [--steps 40]

Takes a quarter of an hour. Needs network namespaces. Writes benchmarks/results/cells-{nodes}.json, the bench's own format
without the loss of every step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, write

LINKS = "100mbit,500mbit,1000mbit,unlimited"
METHODS = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4"


def run(arguments: list[str]) -> int:
    """Run the cells; returns the worst exit code of the bench."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cells")
    parser.add_argument("--jobs", default="transformer,mlp,resnet")
    parser.add_argument("--nodes", default="2,4")
    parser.add_argument("--links", default=LINKS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    worst = 0
    for nodes in options.nodes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "bench.json"
            command = [sys.executable, "-m", "gradwire", "bench", "--jobs", options.jobs, "--links", options.links]
            command += ["--methods", options.methods, "--nodes", nodes, "--steps", str(options.steps)]
            worst = max(worst, subprocess.run([*command, "--json", str(result)]).returncode)
            if result.exists():
                run = json.loads(result.read_text())
                run.pop("made", None)  # it names this machine's paths
                for cell in run["cells"]:
                    cell.pop("loss", None)
                    cell.pop("step_us", None)
                    cell.pop("cpu_us", None)
                write(RESULTS / f"cells-{nodes}.json", run)
    return worst
