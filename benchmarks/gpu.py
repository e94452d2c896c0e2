"""Runs all tests that need a GPU, then measures GB/s of the GPU kernels of QSGD and casts, and of every compressor's
encode and decode-and-add as the engine calls them, compared with `copy_` between two float32 tensors of the same size.

    python -m benchmarks gpu [--megabytes 4 64 256] [--pairs 15] [--no-tests]

The tests are those that are marked `gpu`; their counts and the messages of those that failed go into the result. A kernel
and the copy are timed in turn by CUDA events, A B A B; the ratio is the median over the pairs of copy time / kernel time.
GB/s count the float32 elements at 4 bytes each. A time is that of 10 calls queued one after another, so that at 4 MB what
the host takes to queue a call is seen where it is longer than the kernel.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.catalogue import ENTRIES
from benchmarks.common import RESULTS, write
from benchmarks.compressors import calls
from benchmarks.kernels import BLOCK, kernels_of
from gradwire.kernels import kernels_for

CALLS = 10
TESTS = Path(__file__).parents[1] / "tests" / "kernels"
MESSAGE = 2000
"""So many characters of a failed test's message are kept."""


class Row(NamedTuple):
    """One kernel, timed."""

    megabytes: int
    kernel: str
    gbps: float
    ratio: float
    copy_gbps: float
    pairs: int


def seconds(call: Callable[[], object]) -> float:
    """Time of one call on the GPU, over several that are queued together."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / CALLS


def calls_of(numel: int) -> dict[str, Callable[[], object]]:
    """Return the timed calls by name."""
    found: dict[str, Callable[[], object]] = dict(kernels_of(kernels_for("cuda"), numel, "cuda"))
    for entry in ENTRIES:
        encode, decode, _ = calls(entry.spec, numel, "cuda")
        found |= {f"{entry.spec!r}: encode": encode, f"{entry.spec!r}: decode": decode}
    return found


def measure(megabytes: int, pairs: int) -> list[Row]:
    """Every kernel at one size, each against the copy, in turn."""
    numel = megabytes * 2**20 // 4
    source, target = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    rows = []
    for kernel, call in calls_of(numel).items():
        copy = lambda: target.copy_(source)  # noqa: E731
        for warm_up in (copy, call, copy, call):  # the first call compiles
            seconds(warm_up)
        times = [(seconds(copy), seconds(call)) for _ in range(pairs)]
        gbps = [numel * 4e-9 / statistics.median(which) for which in zip(*times, strict=True)]
        ratio = statistics.median(copy_s / kernel_s for copy_s, kernel_s in times)
        rows.append(Row(megabytes, kernel, gbps[1], ratio, gbps[0], pairs))
    return rows


def outcomes(junit: str) -> dict[str, Any]:
    """Return the numbers of passed, failed and skipped tests, and the end of each failure's message, from pytest's
    JUnit XML."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed = {
        f"{case.get('classname')}::{case.get('name')}": (found.text or found.get("message") or "")[-MESSAGE:]
        for case in cases
        if (found := case.find("failure") if case.find("failure") is not None else case.find("error")) is not None
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def run_tests() -> dict[str, Any]:
    """Run every test that is marked `gpu`."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "tests.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={written}", str(TESTS)], check=False)
        return outcomes(written.read_text()) if written.exists() else {"failed": {"pytest": "it wrote no results"}}


def run(arguments: list[str]) -> int:
    """Test, measure, print and write benchmarks/results/gpu.json; without a GPU, say so. 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "nothing is measured: torch sees no CUDA device. Run this where there is one, with `pip install '.[gpu]'`."
        )
        return 0
    tests = None if options.no_tests else run_tests()
    kernels, device = kernels_for("cuda").__name__, torch.cuda.get_device_name()
    rows = [row for megabytes in options.megabytes for row in measure(megabytes, options.pairs)]
    of_size = {(row.kernel, row.megabytes): row for row in rows}
    table = Table(title=f"{device}, {kernels}: GB/s of float32 (and ratio to the copy)", title_justify="left")
    table.add_column("kernel")
    for megabytes in options.megabytes:
        table.add_column(f"{megabytes} MB", justify="right")
    for kernel in dict.fromkeys(row.kernel for row in rows):
        cells = [of_size[kernel, megabytes] for megabytes in options.megabytes]
        table.add_row(kernel, *(f"{row.gbps:.0f} ({row.ratio:.2f})" for row in cells))
    Console().print(table)
    facts = {"torch": torch.__version__, "device": device, "kernels": kernels, "block": BLOCK, "scale": "max"}
    write(RESULTS / "gpu.json", facts | {"tests": tests, "rows": [row._asdict() for row in rows]})
    return 1 if tests is not None and tests["failed"] else 0
