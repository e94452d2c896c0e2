"""`gradwire simulate` and `gradwire import-profile`, from files to tables, JSON and traces."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Identity, Link, Profile, TensorProfile
from gradwire.errors import FormatError, PlanError
from gradwire.plan import Uniform

PAGE = Path(__file__).parents[3] / "docs" / "simulator.md"


@pytest.fixture
def files(tmp_path):
    """Arguments of `gradwire simulate` for a small model with two buckets."""
    tensors = [
        TensorProfile(name=f"layer{i}.weight", shape=(1024, 256), dtype="float32", backward_us=400.0, forward_us=200.0)
        for i in range(2)
    ]
    profile = Profile(model="two layers", batch=1, device="V100", tensors=tensors)
    link = Link(30.0, 10.0)
    codec = CodecCosts(spec=QSGD(), device="gpu", encode=[(4096, 12.0), (4194304, 40.0)], decode=[(4096, 9.0), (4194304, 25.0)])
    profile.save(tmp_path / "profile.json")
    Cluster(nodes=4, ranks_per_node=1, intra=link, inter=link).save(tmp_path / "cluster.json")
    Costs(codecs=[codec]).save(tmp_path / "costs.json")
    for name, spec in (("qsgd", QSGD()), ("plain", Identity())):
        Uniform(spec, bucket_bytes=1).plan(profile.tensor_infos("gpu")).save(tmp_path / f"{name}.json")
    return tmp_path


def simulate(files, plan, *more, costs=True):
    arguments = ["simulate", str(files / plan)]
    for name in ("profile", "cluster", *["costs"] * costs):
        arguments += [f"--{name}", str(files / f"{name}.json")]
    return CliRunner().invoke(app, [*arguments, *more])


def test_the_table_adds_up(files):
    done = simulate(files, "qsgd.json")
    assert done.exit_code == 0
    step = float(re.search(r"^step ([\d.]+) ms \(backward\)", done.output, re.MULTILINE).group(1))
    parts = re.findall(r"^  \w[\w ]* +([\d.]+) ms$", done.output, re.MULTILINE)
    assert len(parts) == 5
    assert sum(map(float, parts)) == pytest.approx(step, abs=0.005)
    for resource in ("compute", "cpu pool", "intra link", "inter link"):
        assert resource in done.output


def test_json_is_canonical_and_the_same_again(files):
    first, second = (simulate(files, "qsgd.json", "--json").output for _ in range(2))
    assert first == second
    timeline = json.loads(first)
    assert json.dumps(timeline, sort_keys=True, separators=(",", ":")) + "\n" == first
    assert timeline["step_us"] > 1200
    assert {event["what"] for event in timeline["events"]} >= {"forward", "backward", "comp", "alltoall", "allgather"}


def test_the_trace_is_written(files):
    assert simulate(files, "qsgd.json", "--trace", str(files / "step.json")).exit_code == 0
    trace = json.loads((files / "step.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


def test_plain_plans_need_no_costs(files):
    assert simulate(files, "plain.json", costs=False).exit_code == 0
    refused = simulate(files, "qsgd.json", costs=False)
    assert isinstance(refused.exception, PlanError)
    assert "no times of QSGD" in str(refused.exception)


def test_rules_can_be_changed(files):
    usual = simulate(files, "qsgd.json", "--json").output
    for option in (["--codec-on", "own thread"], ["--decode", "none"], ["--lanes", "1"]):
        assert simulate(files, "qsgd.json", "--json", *option).output != usual
    assert "device is 'tpu'" in str(simulate(files, "qsgd.json", "--device", "tpu").exception)


def test_imported_files_can_be_simulated(tmp_path, files):
    published = {"model": "m", "source": "s", "tensors": [["a", 1000, 0], ["b", 2000, 100]]}
    times = {"dgc_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]]}
    for name, data in (("published", published), ("times", times)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    out = tmp_path / "imported.json"
    done = CliRunner().invoke(app, ["import-profile", str(tmp_path / "published.json"), "-o", str(out), "--batch", "8"])
    assert done.output == f"profile written to {out}.\n"
    assert Profile.load(out).batch == 8
    done = CliRunner().invoke(app, ["import-profile", str(tmp_path / "times.json"), "-o", str(out)])
    assert done.output == f"costs written to {out}.\n"
    assert len(Costs.load(out).codecs) == 2


@pytest.mark.parametrize("name", ["times.csv", "times.json"])
def test_codec_times_have_no_batch_and_no_device(tmp_path, name):
    source, out = tmp_path / name, tmp_path / "costs.json"
    source.write_text('{"dgc_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]]}')
    for option, value in (("--batch", "-5"), ("--device", "")):
        refused = CliRunner().invoke(app, ["import-profile", str(source), "-o", str(out), option, value])
        assert isinstance(refused.exception, FormatError) and f"({option}) is " in str(refused.exception)
    assert not out.exists()


def test_simulating_does_not_load_torch(files):
    code = """if True:
        import sys
        from gradwire.cli import main
        sys.argv = ["gradwire", *sys.argv[1:]]
        try:
            main()
        except SystemExit:
            sys.exit(any(name in sys.modules for name in ("torch", "numpy")))
    """
    paths = [str(files / name) for name in ("plain.json", "profile.json", "cluster.json")]
    arguments = ["simulate", paths[0], "--profile", paths[1], "--cluster", paths[2]]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout


def test_what_the_page_names_exists():
    page = PAGE.read_text()
    commands = re.findall(r"gradwire (simulate|import-profile)((?: --?[\w-]+(?: [^-\s]\S*)?| \S+\.json)+)", page)
    assert commands
    known = {parameter for command in app.registered_commands for parameter in command.callback.__annotations__}
    for _, options in commands:
        for option in re.findall(r"--([\w-]+)", options):
            assert option.replace("-", "_") in known
