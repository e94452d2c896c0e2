"""The tests that are marked `gpu`, over several processes where pytest-xdist is installed."""

import os
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.findings import SKIPPED, Job

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "kernels"
"""The folder of all tests that are marked `gpu`."""
WORKERS = 14
"""So many processes at most: each keeps about half a gigabyte on the GPU."""


def imports(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def run(job: Job) -> None:
    missing = [name for name in ("pytest", "hypothesis") if not imports(name)]
    if missing:
        job.write("the tests", SKIPPED, why=f"not installed: {', '.join(missing)}")
        return
    import pytest

    options = ["-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.recorder"]
    if imports("xdist") and not job.small:  # on a CPU all are skipped
        options += ["-n", str(max(2, min(WORKERS, len(os.sched_getaffinity(0)) - 2))), "--dist", "load"]
    code = pytest.main([*options, f"--gpu-job={job.to_json()}", str(TESTS)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(code))
