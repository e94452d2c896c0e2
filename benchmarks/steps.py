"""The step of every compressor on slow links, interleaved with DDP and PyTorch's PowerSGD hook in one run.

    python -m benchmarks steps [--jobs transformer,mlp] [--links 100mbit,500mbit] [--steps 15]

Takes twenty minutes. Needs network namespaces. Writes benchmarks/results/steps.json. 1 if a compressor is slower than DDP,
or ErrorFeedback(TopK(0.01)) or PowerSGD slower than the hook.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.catalogue import ENTRIES
from benchmarks.common import RESULTS, write

PLAIN = ("floor", "ddp", "ddp-powersgd")
AS_FAST_AS_THE_HOOK = ("ErrorFeedback(TopK(0.01))", "PowerSGD(rank=4)")
WARMUP_STEPS = 12
"""PowerSGD's first ten steps are whole ones."""
SAME = 1.02
"""Medians within so much of each other are no difference on a shared machine."""


def run(arguments: list[str]) -> int:
    """Run the cells and say which compressors are not faster."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks steps")
    parser.add_argument("--jobs", default="transformer,mlp")
    parser.add_argument("--links", default="100mbit,500mbit")
    parser.add_argument("--steps", default="15")
    options = parser.parse_args(arguments)
    methods = ",".join([*PLAIN, *(f"gradwire:{entry.spec!r}" for entry in ENTRIES)])
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "benchmarks", "methods", "--jobs", options.jobs, "--links", options.links]
        command += ["--methods", methods, "--steps", options.steps, "--warmup", str(WARMUP_STEPS)]
        command += ["--alone-steps", "0", "--json", str(result)]
        failed = subprocess.run(command).returncode
        if not result.exists():
            return failed
        bench = json.loads(result.read_text())
    medians: dict[str, dict[str, float]] = {}
    for cell in bench["cells"]:
        if cell.get("step"):
            medians.setdefault(f"{cell['job']}, {cell['link']}", {})[cell["method"]] = cell["step"]["median_us"]
    slow = [line for where, found in medians.items() for line in slower(where, found)]
    for line in slow:
        print(line)
    facts = {name: bench[name] for name in ("torch", "cores", "network", "nodes", "steps", "warmup_steps", "turn_steps")}
    write(RESULTS / "steps.json", facts | {"median_us": medians, "slower": slow})
    return 1 if slow or failed else 0


def slower(where: str, found: dict[str, Any]) -> list[str]:
    """One line for each that is slower than it should be."""
    told = []
    for entry in ENTRIES:
        method, name = f"gradwire:{entry.spec!r}", repr(entry.spec)
        others = ["ddp", "ddp-powersgd"] if name in AS_FAST_AS_THE_HOOK else ["ddp"]
        for other in others:
            if method in found and other in found and found[method] > SAME * found[other]:
                told.append(f"{where}: {name} {found[method] / 1e3:.0f} ms, {other} {found[other] / 1e3:.0f} ms")
    return told
