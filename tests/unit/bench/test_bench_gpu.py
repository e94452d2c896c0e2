"""What `python -m benchmarks gpu` keeps of the tests that it ran, and which tests these are."""

import re
from pathlib import Path

import pytest

from benchmarks import gpu

JUNIT = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
<testcase classname="kernels.test_a" name="test_bytes[2]" time="0.1"/>
<testcase classname="kernels.test_a" name="test_bytes[3]" time="0.1"><failure message="assert 1 == 2">trace
assert 1 == 2</failure></testcase>
<testcase classname="kernels.test_a" name="test_waits" time="0.1"><error message="no device">no device</error></testcase>
<testcase classname="kernels.test_b" name="test_large" time="0.1"><skipped message="no CUDA device"/></testcase>
</testsuite></testsuites>"""


def test_what_failed_is_kept_with_its_message() -> None:
    assert gpu.outcomes(JUNIT) == {
        "passed": 1,
        "skipped": 1,
        "failed": {
            "kernels.test_a::test_bytes[3]": "trace\nassert 1 == 2",
            "kernels.test_a::test_waits": "no device",
        },
    }


def test_a_failure_makes_the_exit_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "kernels_for", lambda device: gpu)
    monkeypatch.setattr(gpu, "measure", lambda megabytes, pairs: [])
    for failed, code in (({}, 0), ({"test_a": "no"}, 1)):
        monkeypatch.setattr(gpu, "run_tests", lambda failed=failed: {"passed": 1, "skipped": 0, "failed": failed})
        assert gpu.run([]) == code
        assert '"passed": 1' in (tmp_path / "gpu.json").read_text()


def test_every_test_for_a_gpu_is_in_the_folder_that_is_run() -> None:
    tests = Path(__file__).parents[2]
    marked = [path for path in tests.rglob("test_*.py") if re.search(r"^@pytest\.mark\.gpu$", path.read_text(), re.M)]
    assert len(marked) > 5
    assert [path for path in marked if gpu.TESTS not in path.parents] == []
