"""The table of `python -m benchmarks members`, and when its members are killed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import members
from benchmarks.members import Course, kills_of, table


def row(arm: str, samples: list[int], losses: list[float]) -> dict[str, object]:
    curve = [
        {"s": 10.0 * (number + 1), "steps": each // 16, "samples": each, "loss": loss}
        for number, (each, loss) in enumerate(zip(samples, losses, strict=True))
    ]
    return {"link": "100mbit", "arm": arm, "seed": 0, "seconds": 30.0, "kills": 1, "killed": [25.0], "curve": curve}


def test_arms_are_compared_with_torchft_in_samples_and_in_seconds() -> None:
    lines = table([row("torchft ddp", [16, 64, 64], [4.0, 2.0, 2.0]), row("elastic 2 bits", [96, 192, 384], [2.0, 1.5, 1.0])])
    assert lines[2].split("|")[-5:-1] == ["  "] * 4
    assert lines[3] == "| 100mbit | elastic 2 bits | 24 | 384 | 1.000 | torchft ddp | 3.0 | 6.0 | 2.0 |"


def test_an_arm_that_never_reaches_the_loss_is_said_to() -> None:
    lines = table([row("torchft diloco", [16], [2.0]), row("elastic local", [160], [2.5])])
    assert lines[3].endswith("| torchft diloco | 10.0 | 10.0 | never |")


def test_node_0_is_never_killed() -> None:
    assert {node for _, node in kills_of(180.0, 7)} == {1, 2, 3}
    assert all(0 < at_s < 180.0 for at_s, _ in kills_of(180.0, 7))


def test_members_begin_when_all_are_ready(tmp_path: Path) -> None:
    course = Course(tmp_path, 0.0, [])
    for rank in range(4):
        assert not (tmp_path / "go").exists()
        course.line(rank, "stdout", json.dumps({"ready": rank, "pid": 1}))
    course.line(0, "stdout", json.dumps({"began": time.time()}))
    course.line(0, "stdout", json.dumps({"saved": 1, "s": 3.0, "steps": 2, "samples": 32}))
    course.end()
    assert (tmp_path / "go").exists() and (tmp_path / "end").exists()
    assert [each["steps"] for each in course.saved] == [2]


def test_a_cell_that_fails_leaves_the_others_to_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(link: str, arm: str, *_: Any) -> dict[str, Any]:
        if arm == "torchft diloco":
            raise ChildProcessError("the nodes ended with exit code 124")
        return {"curve": [{"s": 1.0, "steps": 1, "samples": 16, "loss": 2.0}]}

    monkeypatch.setattr(members, "emulation_problem", lambda: None)
    monkeypatch.setattr(members, "measured", measured)
    out = tmp_path / "members.jsonl"
    arms = ["--arms", "torchft diloco", "elastic local"]
    assert members.run(["--links", "100mbit", *arms, "--out", str(out)]) == 1
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()] == ["elastic local"]
    assert "not measured: the nodes ended with exit code 124" in capsys.readouterr().out
