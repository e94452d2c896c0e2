"""`python -m benchmarks gpu`: what its file holds after a whole run on a CPU, and after a run that was killed."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.catalogue import ENTRIES
from benchmarks.gpu import findings, marked
from benchmarks.gpu.findings import Job
from benchmarks.gpu.kernels import differing, largest_difference, outcome_of
from benchmarks.gpu.table import summary
from benchmarks.gpu.training import LARGE_PLANS, PLANS

ROOT = Path(__file__).resolve().parents[2]


def job_for(file: Path, section: str = "facts", seconds: float = 60.0) -> Job:
    return Job(section, str(file), "2026-01-01T00:00:00+00:00", "cpu", (1,), time.time() + seconds)


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--out", str(folder), *more]


def read(file: Path) -> list[dict[str, Any]]:
    """All lines, each of which must be whole."""
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def processes_of(file: Path) -> list[str]:
    """Processes whose command names the file."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(file) in words:
            found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_on_a_cpu_writes_the_findings_of_every_section(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--minutes", "8"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        env=gpu.environment(),
    )
    rows = read(tmp_path / "cpu.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({row["run"] for row in rows}) == 1
    assert all(row["at"] and row["what"] for row in rows)
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of[row["section"]].append(row)
    assert list(of) == [section.name for section in gpu.SECTIONS]
    outcomes = {section: Counter(row["outcome"] for row in found) for section, found in of.items()}
    assert {row["what"] for row in of["kernels"]} == {repr(entry.spec) for entry in ENTRIES}
    assert outcomes["kernels"].keys() <= {"passed", "near"} and outcomes["kernels"]["passed"] > 20
    assert outcomes["engine"] == {"passed": len(PLANS), "skipped": 1, "measured": 1}
    assert outcomes["ranks"].keys() <= {"passed", "near"} and outcomes["ranks"].total() == len(PLANS) + 2
    assert outcomes["staged"].keys() <= {"passed", "near"} and outcomes["staged"].total() == 2 * (len(PLANS) + 2) + 2
    told = {row["what"]: row["reported"] for row in of["staged"] if "reported" in row}
    assert "changed on their way" in told["2 ranks, a flipped bit"] and "rank 1 did not answer" in told["2 ranks, a killed rank"]
    assert outcomes["floors"] == {"skipped": 1}
    assert outcomes["speed"] == {"measured": 2 * len(ENTRIES)}
    assert outcomes["host"] == {"measured": len(LARGE_PLANS), "skipped": 1}
    assert outcomes["sample"] == {"measured": len(LARGE_PLANS) - 1}
    assert all(row["samples"] and row["at"] for row in of["sample"])
    assert outcomes["marked"] == {"measured": 1, "skipped": of["marked"][0]["count"]}
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"kernels +\d+( +\S+){5}", next(line for line in lines if re.match(r"kernels  ", line)))
    assert re.search(r"^QSGD\(bits=4, block=128\) +\d+\.\d\d \d+\.\d\d$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_every_finished_finding_and_no_process(tmp_path: Path) -> None:
    file, printed, seconds = tmp_path / "cpu.jsonl", tmp_path / "printed", random.uniform(0.0, 5.0)
    print(f"killed {seconds:.2f} s after its first finding")
    sections = ("--only", "facts", "kernels", "ranks", "marked")
    with printed.open("w") as output:
        process = subprocess.Popen(command(tmp_path, *sections), cwd=ROOT, stdout=output, env=gpu.environment())
    seen = ""
    try:
        until = time.time() + 60
        while not file.exists() and time.time() < until:
            time.sleep(0.01)
        until = time.time() + seconds
        while time.time() < until:
            seen = file.read_text()
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    until = time.time() + 30
    while (left := processes_of(file)) and time.time() < until:
        time.sleep(0.1)
    assert left == []
    assert file.read_text().startswith(seen), "a finding that was there is gone"
    rows = read(file)
    assert rows[0]["section"] == "facts"
    assert "aborted" not in {row["outcome"] for row in rows}
    ended = dict(re.findall(r"^(\w+): (\d+) findings", printed.read_text(), re.MULTILINE))
    counts = Counter(row["section"] for row in rows)
    assert {section: counts[section] for section in ended} == {section: int(count) for section, count in ended.items()}
    subprocess.run(command(tmp_path, "--only", "facts"), cwd=ROOT, check=True, timeout=300, env=gpu.environment())
    after = read(file)
    assert after[: len(rows)] == rows
    assert len(after) == len(rows) + 4


def test_a_section_is_ended_at_its_deadline(tmp_path: Path) -> None:
    job = job_for(tmp_path / "cpu.jsonl", seconds=0.05)
    assert not gpu.run_section(job)
    (row,) = read(tmp_path / "cpu.jsonl")
    assert (row["section"], row["outcome"]) == ("facts", "aborted") and "deadline" in row["why"]
    lines, bad = summary([row])
    assert bad and lines[2].endswith("aborted")


def test_a_section_that_fails_leaves_what_it_printed_last(tmp_path: Path) -> None:
    assert not gpu.run_section(job_for(tmp_path / "cpu.jsonl", section="nothing"))
    (row,) = read(tmp_path / "cpu.jsonl")
    assert row["outcome"] == "aborted" and row["why"] == "ended with exit status 1"
    assert "No module named 'benchmarks.gpu.nothing'" in row["printed"]


def test_sections_share_the_time_by_their_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    def run_section(job: Job) -> bool:
        seen[job.section] = job.left()
        return True

    monkeypatch.setattr(gpu, "run_section", run_section)
    sections = [gpu.Section("facts", 1, 1, ""), gpu.Section("ranks", 3, 1, ""), gpu.Section("marked", 1, 2, "")]
    for device, expected in (("cuda", [20, 75, 100]), ("cpu", [25, 100 / 3, 100])):
        gpu.run_sections(sections, job_for(tmp_path / "x")._replace(device=device), time.time() + 100, lambda line: None)
        assert list(seen.values()) == pytest.approx(expected, abs=1)


def test_a_line_without_an_end_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "cpu.jsonl"
    findings.mend(file)
    for text, kept in (("", ""), ("{}\n", "{}\n"), ('{}\n{"section', "{}\n"), ('{"section', "")):
        file.write_text(text)
        findings.mend(file)
        assert file.read_text() == kept


TESTS = """
import os
import pytest

def test_one():
    pass

def test_two():
    assert 1 == 2

@pytest.mark.skip(reason="no device")
def test_three():
    pass

def test_four():
    os._exit(9)

def test_five():
    pass
"""


@pytest.mark.slow
def test_outcomes_of_tests_are_written_as_each_ends(tmp_path: Path) -> None:
    """The process ends in the fourth test, without a chance to write anything."""
    (tmp_path / "test_some.py").write_text(TESTS)
    job = job_for(tmp_path / "found.jsonl", section="marked")
    options = ["-q", "-p", "benchmarks.gpu.recorder", "-p", "no:cacheprovider", f"--gpu-job={job.to_json()}"]
    here = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(here, cwd=ROOT, env=gpu.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 9, done.stdout + done.stderr
    rows = [(row["what"].rpartition("::")[2], row["outcome"]) for row in read(tmp_path / "found.jsonl")]
    assert rows == [
        ("tests to run", "measured"),
        ("test_one", "passed"),
        ("test_two", "failed"),
        ("test_three", "skipped"),
    ]
    failed = read(tmp_path / "found.jsonl")[2]
    assert "assert 1 == 2" in failed["error"]


@pytest.mark.slow
def test_sections_load_without_packages_that_images_lack(tmp_path: Path) -> None:
    lacked = ("rich", "typer", "psutil", "sklearn", "matplotlib", "pytest", "hypothesis", "xdist", "yaml")
    for name in lacked:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    sections = [f"benchmarks.gpu.{section.name}" for section in gpu.SECTIONS]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {['benchmarks.__main__', *sections]}]"
    code += "; import gradwire as gw; gw.parallelize; gw.Exchange"
    environment = gpu.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = job_for(tmp_path / "cpu.jsonl", section="marked")
    again = [sys.executable, "-m", "benchmarks.gpu.section", job.to_json()]
    subprocess.run(again, cwd=ROOT, env=environment, check=True, timeout=60)
    (row,) = read(tmp_path / "cpu.jsonl")
    assert row["outcome"] == "skipped" and row["why"] == "not installed: pytest, hypothesis"


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "device_name", lambda: None)
    assert gpu.run(["--out", str(tmp_path / "results")]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_files_are_named_after_devices() -> None:
    names = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu", "NVIDIA"]
    assert [gpu.file_name(name) for name in names] == ["h200.jsonl", "h100-80gb-hbm3.jsonl", "cpu.jsonl", "gpu.jsonl"]


def test_bits_are_compared_and_sums_may_have_another_order() -> None:
    a = torch.tensor([1.0, -0.0, float("nan")])
    assert differing(a, a.clone()) == 0
    assert differing(a, torch.tensor([1.0, 0.0, float("nan")])) == 1
    assert largest_difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])) == pytest.approx(0.2)
    assert outcome_of({"sum": 0}, {}, False) == "passed"
    assert outcome_of({"sum": 3}, {"sum": 1e-7}, False) == "differs"
    assert outcome_of({"sum": 3}, {"sum": 1e-7}, True) == "near"
    assert outcome_of({"sum": 3}, {"sum": 1e-3}, True) == "differs"
    assert outcome_of({"sum": 3}, {"sum": float("nan")}, True) == "differs"
    assert outcome_of({"payload 0": 3, "sum": 0}, {"payload 0": 2.0}, True) == "near"


def test_every_test_for_a_gpu_is_in_the_folder_that_is_run() -> None:
    tests = ROOT / "tests"
    found = [path for path in tests.rglob("test_*.py") if re.search(r"^@pytest\.mark\.gpu$", path.read_text(), re.M)]
    assert len(found) > 5
    assert [path for path in found if marked.TESTS not in path.parents] == []
