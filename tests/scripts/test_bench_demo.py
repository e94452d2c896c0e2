"""`gradwire demo` where no namespaces are allowed: it still runs, and says what it did not measure."""

import json

import pytest
from typer.testing import CliRunner

from gradwire.cli import app

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The command's output and the folder it wrote."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.bench.runner.permission_problem", lambda: "this test has no permission")
        result = CliRunner().invoke(app, ["demo", "--steps", "4", "--out", str(out)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result, out


@pytest.mark.slow
def test_summary_is_written(demo):
    result, out = demo
    assert result.exit_code == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["link"] == "500mbit" and summary["nodes"] == 2
    for name in ("floor", "ddp", "gradwire"):
        assert {"step_ms", "final_loss", "bytes_per_step"} <= set(summary["methods"][name])
    assert summary["speed"] == "computed, not measured"
    ddp, ours = summary["methods"]["ddp"], summary["methods"]["gradwire"]
    assert ddp["bytes_per_step"] > 6 * ours["bytes_per_step"]
    assert ours["final_loss"] == pytest.approx(ddp["final_loss"], rel=0.1)
    assert summary["speedup"] > 0


@pytest.mark.slow
def test_picture_and_raw_results_are_written(demo):
    _, out = demo
    assert (out / "demo.png").read_bytes().startswith(PNG)
    assert (out / "bench.json").exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "bench.json",
        "demo.png",
        "report.html",
        "run.json",
        "summary.json",
    ]


@pytest.mark.slow
def test_what_was_not_measured_is_said(demo):
    result, _ = demo
    assert "computed, not measured" in result.output
    assert "this test has no permission" in result.output


@pytest.mark.slow
def test_without_a_slow_link_there_is_nothing_to_decide_by(demo):
    result, out = demo
    summary = json.loads((out / "summary.json").read_text())
    assert "4 bits for all tensors, a fixed plan" in summary["decided"]
    assert "4 bits" in " ".join(result.output.split())
