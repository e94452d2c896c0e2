"""`python -m benchmarks variants`: every Triton kernel that trainings launch compiles, without a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
def test_every_variant_compiles_by_the_installed_version() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks", "variants", "--arch", "80", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (\S+) \| (\d\.\d) \| +(\d+) \| +(\d+) \| +(\d+) \|", done.stdout, re.MULTILINE)
    assert [arch for _, arch, *_ in rows] == ["8.0", "9.0"]
    for _, _, kernels, variants, errors in rows:
        assert int(kernels) > 20 and int(variants) > 50 and errors == "0"
