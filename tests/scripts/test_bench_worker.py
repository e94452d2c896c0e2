"""Two ranks on plain loopback: the worker, the launcher and the runner end to end, with very few steps."""

import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from interpreters import Interpreters
from silent import silent

from gradwire.bench.loopback import Loopback
from gradwire.bench.names import GivenModel
from gradwire.bench.results import BenchRun, Cell, MethodRecord, WorkerOrder, WorkerRecord
from gradwire.bench.runner import BenchRequest, run_bench
from gradwire.errors import TestbedError
from gradwire.testbed import permission_problem

POPEN = "gradwire.testbed.supervisor.subprocess.Popen"
STEPS, WARMUP = 3, 3
PROBLEM = "this test asks for plain loopback"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.skipif(permission_problem() is not None, reason=str(permission_problem()))
def test_bytes_of_a_link_of_its_own_are_those_planned(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(2000, 1000)\n")
    monkeypatch.chdir(tmp_path)
    given = GivenModel(model="own_model:make", input="4x2000")
    request = BenchRequest(
        jobs=[given.model],
        model=given,
        links=["1gbit"],
        methods=["floor", "ddp", "gradwire:qsgd4"],
        steps=2,
        warmup_steps=3,
        alone_steps=0,
    )
    run = run_bench(request, None, silent())
    assert not run.failures
    floor, ddp, ours = run.cells
    assert floor.counted_bytes < 10_000
    assert 1.0 < ddp.counted_over_planned < 1.05
    assert 1.0 < ours.counted_over_planned < 1.05
    assert ours.codec_us > 0 and ours.attainable_us >= ours.ideal_us
    assert run.network == "namespaces"


@pytest.fixture(scope="module")
def bench_run(interpreters: Interpreters, tmp_path_factory):
    """A run of three methods on the MLP, and the file it left."""
    request = BenchRequest(
        jobs=["mlp"],
        links=["500mbit", "unlimited"],
        methods=["floor", "ddp", "ddp-powersgd"],
        steps=STEPS,
        warmup_steps=WARMUP,
        turn_steps=2,
        alone_steps=2,
    )
    path = tmp_path_factory.mktemp("bench") / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, interpreters.start)
        return run_bench(request, PROBLEM, silent(), path), path


@pytest.mark.slow
def test_file_has_every_key_and_is_the_result(bench_run):
    run, path = bench_run
    assert not run.failures
    assert BenchRun.load(path) == run
    data = msgspec.json.decode(path.read_bytes())
    assert set(data) == set(BenchRun.__struct_fields__) - set(BenchRun.omit_at_default)
    assert [cell["method"] for cell in data["cells"]] == ["floor", "ddp", "ddp-powersgd"]
    for cell in data["cells"]:
        assert set(cell) == set(Cell.__struct_fields__)
        may_be_null = {"failure", "gbps", "crossing_bytes", "phases"}
        if cell["method"] == "floor":
            may_be_null |= {"counted_over_planned"}
        if cell["method"] == "ddp-powersgd":
            may_be_null |= {"codec_us", "attainable_us"}
        assert {key for key, value in cell.items() if value is None} == may_be_null
        assert len(cell["loss"]) == len(cell["step_us"]) == STEPS + WARMUP


@pytest.mark.slow
def test_limited_links_are_said_to_be_left_out(bench_run):
    run, _ = bench_run
    assert run.network == "loopback"
    assert any("500mbit" in note and PROBLEM in note for note in run.notes)
    assert {cell.link for cell in run.cells} == {"unlimited"}


@pytest.mark.slow
def test_bytes_on_the_interface_are_those_planned(bench_run):
    run, _ = bench_run
    floor, ddp, powersgd = run.cells
    assert ddp.planned_bytes == 4 * 5_523_850  # two ranks: an all-reduce sends the gradient once
    assert powersgd.planned_bytes < ddp.planned_bytes / 38
    # no upper bound: whatever else on this machine uses loopback is counted too, and the run says so
    assert ddp.counted_over_planned > 1.0
    assert powersgd.counted_over_planned > 1.0
    assert floor.planned_bytes == 0
    assert any("other programs" in note for note in run.notes)


@pytest.mark.slow
def test_methods_begin_from_the_same_model_and_batches(bench_run):
    run, _ = bench_run
    assert run.cells[0].loss[0] == run.cells[1].loss[0] == run.cells[2].loss[0]


def test_only_limited_links_on_loopback_are_refused():
    request = BenchRequest(jobs=["mlp"], links=["500mbit"], methods=["ddp"])
    with pytest.raises(TestbedError, match="500mbit"):
        run_bench(request, PROBLEM, silent())


@pytest.mark.slow
def test_a_method_that_fails_leaves_the_others_their_results(interpreters: Interpreters, tmp_path, monkeypatch):
    """A plan file that is none fails when it is read, on every rank; the floor goes on."""
    monkeypatch.setattr(POPEN, interpreters.start)
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    order = WorkerOrder(
        job="mlp",
        methods=("floor", f"gradwire:{plan}"),
        seed=0,
        steps=1,
        warmup_steps=0,
        turn_steps=1,
        collective_timeout_s=30.0,
        runner=os.getpid(),
        result=str(tmp_path / "record.json"),
    )
    order.save(tmp_path / "order.json")
    lines = []
    argv = [sys.executable, "-m", "gradwire.bench.worker", str(tmp_path / "order.json")]
    code = Loopback(2).run(argv, env={"OMP_NUM_THREADS": "1"}, on_line=lambda *line: lines.append(line))
    assert code == 0, lines
    floor, broken = WorkerRecord.load(tmp_path / "record.json").methods
    assert isinstance(broken, MethodRecord)
    assert floor.failure is None and len(floor.loss) == 2
    assert broken.failure is not None and broken.failure.startswith("rank 0: ")


def test_ranks_that_die_are_a_failure_of_every_cell(monkeypatch):
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr("gradwire.bench.runner.sys.executable", "/bin/false")
    request = BenchRequest(jobs=["mlp"], links=["unlimited"], methods=["floor", "ddp"], alone_steps=1)
    run = run_bench(request, PROBLEM, silent())
    assert len(run.failures) == 3
    assert all("exit code 1" in failure for failure in run.failures)


def test_a_group_that_takes_too_long_says_what_to_do(monkeypatch, tmp_path):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("gradwire.bench.runner.sys.executable", str(sleeper))
    request = BenchRequest(jobs=["mlp"], links=["unlimited"], methods=["ddp"], alone_steps=0, group_timeout_s=0.2)
    (failure,) = run_bench(request, PROBLEM, silent()).failures
    assert "took longer than 0.2 s" in failure and "Take fewer steps or methods" in failure and "nothing last" in failure


def test_launcher_reports_lines_codes_and_timeouts():
    lines = []
    program = "import os, sys; print(os.environ['RANK']); sys.exit(int(os.environ['RANK']) * 3)"
    code = Loopback(2).run([sys.executable, "-c", program], on_line=lambda *line: lines.append(line))
    assert code == 3
    assert sorted(lines) == [(0, "stdout", "0"), (1, "stdout", "1")]
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert Loopback(2).run(sleeping, on_line=lambda *_: None, timeout=0.2) == 124


def test_ranks_end_when_their_launcher_is_told_to():
    program = (
        "import sys; from gradwire.bench.loopback import Loopback; say = 'import os, time; print(os.getpid(), flush=True); "
        "time.sleep(60)'; Loopback(2).run([sys.executable, '-c', say], on_line=lambda *line: print(line[2], flush=True))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=30) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_loopback_refuses_a_limit():
    with pytest.raises(TestbedError, match="100mbit"):
        Loopback(2).set_inter("100mbit")


def test_ranks_train_a_model_of_the_current_directory(interpreters: Interpreters, tmp_path, monkeypatch):
    monkeypatch.setattr(POPEN, interpreters.start)
    (tmp_path / "own_model.py").write_text("from torch import nn\n\n\ndef make(width):\n    return nn.Linear(6, width)\n")
    monkeypatch.chdir(tmp_path)
    given = GivenModel(model="own_model:make", config="width=50", input="4x6")
    request = BenchRequest(
        jobs=[given.model],
        model=given,
        links=["unlimited"],
        methods=["ddp", "gradwire:qsgd4"],
        steps=2,
        alone_steps=2,
        record=tmp_path / "runs",
    )
    run = run_bench(request, PROBLEM, silent())
    assert not run.failures
    assert [(cell.job, cell.method) for cell in run.cells] == [(given.model, "ddp"), (given.model, "gradwire:qsgd4")]
    assert run.alone[0].parameters == 350
    assert (tmp_path / "runs" / "own_model-make-unlimited" / "gradwire-qsgd4" / "run.json").exists()
