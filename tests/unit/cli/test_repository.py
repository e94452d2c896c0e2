"""What only the repository has: it is found from anywhere where there is one, and without one the error says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_planner_joint import CODECS, made_up

import gradwire
from benchmarks.papers.methods import METHODS as OF_PAPERS
from gradwire.core import Costs
from gradwire.core.repository import from_repository
from gradwire.errors import GradwireError
from gradwire.planner.methods import METHODS, RIVALS
from gradwire.planner.sweep import SWEPT

PACKAGE = Path(gradwire.__file__).parent
FILES = ["profile.json", "--cluster", "cluster.json", "--costs", "costs.json", "--spec", "qsgd4"]

ASK = """
import json, sys
from typer.testing import CliRunner
from gradwire.cli import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    print(json.dumps([done.exit_code, str(done.exception or ""), done.output]))
"""


def ask(folder: Path, package: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, error and output of each command, given in a folder with a profile, with the gradwire of `package`."""
    profile, cluster = made_up(7, 10, gbps=1.0, nodes=4)
    for name, document in (("profile", profile), ("cluster", cluster), ("costs", Costs(codecs=CODECS))):
        document.save(folder / f"{name}.json")
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(commands)],
        cwd=folder,
        env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def another_package_of_the_name(folder: Path) -> None:
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").write_text("")


def test_the_repository_is_found_from_any_folder(tmp_path: Path) -> None:
    another_package_of_the_name(tmp_path)
    planned, measured = ask(
        tmp_path,
        PACKAGE,
        ["plan", *FILES, "--method", "even", "--json"],
        ["bench", "--predict", "--methods", "floor"],
    )
    assert planned[:2] == (0, "") and json.loads(planned[2])["buckets"]
    assert "there is no method to measure" in measured[1]  # floor cannot be predicted, as the moved code says


def test_without_the_repository_the_error_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "site" / "gradwire"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    another_package_of_the_name(tmp_path)
    refused = {
        "`gradwire bench --matrix`": ["bench", "--matrix"],
        "`gradwire bench --papers`": ["bench", "--papers"],
        "`gradwire bench --predict`": ["bench", "--predict"],
        "`gradwire bench --what ceiling`": ["bench", "--what", "ceiling"],
        "`gradwire bench --what phases`": ["bench", "--what", "phases"],
        "`gradwire bench --what options`": ["bench", "--what", "options"],
        "the method 'wrong-on-purpose:reduce-only:qsgd4'": [
            *("bench", "--methods", "wrong-on-purpose:reduce-only:qsgd4"),
        ],
        **{f"the method {name}": ["plan", *FILES, "--method", name] for name in RIVALS},
        "the method cupcake ": ["plan", *FILES, "--inter", "1,10", "--methods", "ddp,cupcake"],
    }
    swept = ["plan", *FILES, "--inter", "1"]
    *said, planned, found = ask(tmp_path, package, *refused.values(), ["plan", *FILES, "--json"], swept)
    for wanted, (code, error, _) in zip(refused, said, strict=True):
        assert code == 1 and error.startswith(f"{wanted.strip()} is not installed"), (wanted, error)
        assert "a wheel of gradwire leaves out benchmarks" in error and "Clone the repository" in error
    assert planned[:2] == (0, "") and json.loads(planned[2])["buckets"]
    assert found[0] == 0
    header = next(line for line in found[2].splitlines() if "inter Gb/s" in line)
    assert header.split()[4:] == list(SWEPT)


def test_rivals_are_what_the_papers_folder_has() -> None:
    assert set(RIVALS) == set(OF_PAPERS) and not set(RIVALS) & set(METHODS)


def test_only_a_missing_repository_is_called_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(GradwireError, match=r"this is not installed: .* benchmarks/papers/no_such\.py, .* Clone"):
        from_repository("papers.no_such", "this")
    monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.delitem(sys.modules, "benchmarks.campaigns.ceiling", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"rich\.table"):
        from_repository("campaigns.ceiling", "this")
