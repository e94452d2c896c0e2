"""The commands of `python -m benchmarks` that measure jobs, and the one that plans by the papers' methods."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_planner_joint import CODECS, made_up

from benchmarks.__main__ import CAMPAIGNS, PARTS, main
from benchmarks.campaigns.measuring import options_parser, request_from
from benchmarks.campaigns.requests import RepositoryRequest
from benchmarks.papers.methods import METHODS as OF_PAPERS
from gradwire.bench.names import MOST_DECIDING_STEPS
from gradwire.core import Costs
from gradwire.planner.methods import METHODS

ROOT = Path(__file__).parents[3]


def test_every_part_is_a_module_that_runs() -> None:
    for part in PARTS:
        module = importlib.import_module(f"benchmarks.{'campaigns.' * (part in CAMPAIGNS)}{part}")
        assert callable(module.run), part


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methods", "--methods", "wrong-on-purpose:half:qsgd4"], "'half' is no part of a step"),
        (["methods", "--methods", "allreduce"], "'allreduce'"),
        (["methods", "--turn", "0"], "turn_steps is 0"),
        (["ceiling", "--links", "5"], "'5'"),
        (["phases", "--jobs", "vgg"], "'vgg'"),
        (["predict", "--methods", "floor"], "there is no method to measure"),
        (["predict", "--spec", "qsgd9"], "bits is 9"),
        (["matrix", "--measure", "--jobs", "vgg"], "'vgg'"),
        (
            ["side_by_side", "--measure", "--turn", "4"],
            "turn_steps is 4, but CD-SGD sends everything in one of 5 steps",
        ),
        (["side_by_side", "--measure", "--intra", "fast"], "'fast'"),
        (["side_by_side", "--measure", "--spec", "qsgd9"], "bits is 9"),
    ],
)
def test_wrong_values_are_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmarks: ") and said in told


@pytest.mark.parametrize("part", ["methods", "ceiling", "phases", "predict", "schemes"])
def test_a_file_in_no_folder_is_refused_before_anything_is_measured(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([part, "--json", "nowhere/x.json"])
    assert "the folder nowhere does not exist" in capsys.readouterr().err


def test_options_become_the_request() -> None:
    words = "--jobs mlp --links 5mbit --nodes 3 --ranks-per-node 2 --intra 1gbit --steps 6 --warmup 4 --turn 2 --seed 7"
    options = options_parser("methods").parse_args([*words.split(), "--alone-steps", "0"])
    assert request_from(options, ["ddp"], Path("runs")) == RepositoryRequest(
        jobs=["mlp"],
        links=["5mbit"],
        methods=["ddp"],
        nodes=3,
        ranks_per_node=2,
        intra="1gbit",
        steps=6,
        warmup_steps=4,
        turn_steps=2,
        deciding_steps=MOST_DECIDING_STEPS,
        alone_steps=0,
        seed=7,
        record=Path("runs"),
    )


def test_the_papers_methods_plan_and_are_swept(tmp_path: Path) -> None:
    assert set(OF_PAPERS) == {"cupcake"} and not set(OF_PAPERS) & set(METHODS)
    profile, cluster = made_up(7, 10, gbps=1.0, nodes=4)
    for name, document in (("profile", profile), ("cluster", cluster), ("costs", Costs(codecs=CODECS))):
        document.save(tmp_path / f"{name}.json")
    files = [str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.json")]
    files += ["--costs", str(tmp_path / "costs.json"), "--spec", "qsgd4"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    planned = run("benchmarks", "plan", *files, "--method", "cupcake", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["buckets"]
    swept = run("benchmarks", "plan", *files, "--inter", "1,10", "--methods", "ddp,cupcake")
    assert swept.returncode == 0 and "Cupcake's own search" in swept.stdout
    refused = run("gradwire", "plan", *files, "--method", "cupcake")
    assert refused.returncode == 2
    assert "gradwire plan has no cupcake" in refused.stderr and "python -m benchmarks plan" in refused.stderr
