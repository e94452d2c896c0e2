"""The examples that are scripts run: one under torchrun, the others on ranks that have the variables of torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import Interpreters
from script_ends import run_ranks

import gradwire
from gradwire.testbed.supervisor import free_port

ROOT = Path(gradwire.__file__).parents[2]
SAID = {
    "c10d_backend.py": r"rank [01]: loss [\d.]+, weights (-?\d+\.\d{6})",
    "accelerate_loop.py": r"rank [01]: loss [\d.]+, weights (-?\d+\.\d{6})",
    "average_models.py": r"rank [01]: norm ([\d.]+), \d+ bytes sent",
    "ddp_hook.py": r"rank [01]: loss [\d.]+, weights (-?\d+\.\d{6})",
    "unequal.py": r"rank [01]: \d+ of 48 samples, weights (-?\d+\.\d{6})",
    "fsdp2_train.py": r"rank [01]: loss [\d.]+, weights (-?\d+\.\d{6})",
    "islands_train.py": r"rank [01]: loss [\d.]+, weights (-?\d+\.\d{6})",
    "lightning_fit.py": r"rank [01]: weights (-?\d+\.\d{6})",
    "transformers_trainer.py": r"rank [01]: weights (-?\d+\.\d{6})",
}
BY_TORCHRUN = "average_models.py"
NEEDS = {"accelerate_loop.py": "accelerate", "lightning_fit.py": "lightning", "transformers_trainer.py": "transformers"}
RUN_BELOW = (BY_TORCHRUN, "unequal.py")


SCRIPTS = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.thorough] * (name in NEEDS)) for name in SAID if name not in RUN_BELOW
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_ranks_end_with_the_same_weights(interpreters: Interpreters, name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    ranks = run_ranks(interpreters, ROOT / "examples" / name)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    printed = "".join(rank.stdout for rank in ranks)
    told = re.findall(SAID[name], printed)
    assert len(told) == 2 and len(set(told)) == 1, printed


def test_an_example_runs_under_torchrun() -> None:
    path = ROOT / "examples" / BY_TORCHRUN
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    told = re.findall(SAID[path.name], done.stdout)
    assert len(told) == 2 and len(set(told)) == 1, done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_unequal_ranks_learn_as_one_process(interpreters: Interpreters) -> None:
    path = ROOT / "examples" / "unequal.py"
    assert len(path.read_text().splitlines()) <= 60
    ranks = run_ranks(interpreters, path)
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    one = interpreters.run([sys.executable, path], env=alone, timeout=180)
    assert [each.returncode for each in (*ranks, one)] == [0, 0, 0], [each.stderr for each in (*ranks, one)]
    weights = [float(re.fullmatch(SAID[path.name], each.stdout.strip())[1]) for each in (*ranks, one)]
    assert weights[0] == weights[1] == pytest.approx(weights[2], abs=1e-4)
    assert one.stdout.startswith("rank 0: 48 of 48 samples") and "48 of 48" not in ranks[0].stdout


def test_the_exchange_without_an_engine_is_an_example_of_30_lines() -> None:
    assert len((ROOT / "examples" / "average_models.py").read_text().splitlines()) <= 30
