"""`gradwire demo` where no namespaces are allowed: it still runs, and says what it did not measure."""

import json

import pytest
from interpreters import Interpreters
from typer.testing import CliRunner

from gradwire.cli import app

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def demo(interpreters: Interpreters, tmp_path_factory):
    """The command's output and the folder it wrote."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.bench.runner.permission_problem", lambda: "this test has no permission")
        patch.setattr("gradwire.testbed.supervisor.subprocess.Popen", interpreters.start)
        result = CliRunner().invoke(app, ["demo", "--seconds", "2", "--out", str(out)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result, out


@pytest.mark.slow
def test_summary_is_written(demo):
    result, out = demo
    assert result.exit_code == 0
    summary = json.loads((out / "summary.json").read_text())
    ddp, ours = summary["methods"]["ddp"], summary["methods"]["gradwire"]
    assert set(summary["methods"]) == {"floor", "ddp", "gradwire"} and summary["nodes"] == 2
    assert ddp["bytes_per_step"] > 6 * ours["bytes_per_step"]
    for method in (ddp, ours):
        assert method["seconds"] >= 2 and method["samples"] == 8 * method["steps"]
        assert method["held_out"][0][0] == 0 and method["held_out"][-1][0] == pytest.approx(method["seconds"])
    assert ddp["held_out"][0][1] == ours["held_out"][0][1], "they do not begin with the same weights"


@pytest.mark.slow
def test_picture_and_raw_results_are_written(demo):
    _, out = demo
    assert (out / "demo.png").read_bytes().startswith(PNG)
    expected = ["bench.json", "demo.png", "report.html", "run.json", "summary.json"]
    assert sorted(path.name for path in out.iterdir()) == expected


@pytest.mark.slow
def test_that_no_link_can_be_emulated_is_said_first(demo):
    result, out = demo
    first = result.output.lstrip().splitlines()[0]
    assert "this test has no permission" in first and "bytes instead of seconds" in first
    assert "4 bits for all tensors, a given plan" in json.loads((out / "summary.json").read_text())["decided"]


def test_wrong_links_and_seconds_are_refused():
    for arguments, words in ((["--link", "fast"], "fast"), (["--seconds", "0"], "or equal to 1")):
        result = CliRunner().invoke(app, ["demo", *arguments])
        assert result.exit_code != 0 and words in result.output + str(result.exception)
