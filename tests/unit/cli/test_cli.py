"""The command line: its options are frozen here, it starts without torch, and errors are one message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire import __version__
from gradwire.bench.names import MOST_DECIDING_STEPS
from gradwire.cli import app

OPTIONS = """\
gradwire
  --version
gradwire bench
  --jobs
  --model
  --config
  --input
  --links = 100mbit,500mbit,1000mbit,unlimited
  --methods = floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4
  --nodes = 2
  --ranks-per-node = 1
  --steps = 30
  --warmup = 5
  --device = cpu
  --record
  --json
gradwire compressors
  --json
gradwire demo
  --link = 100mbit
  --seconds = 25.0
  --out = runs/demo
  --json
gradwire doctor
  --timeout = 60.0
  --flight
  FILES
  --json
gradwire emulate
  COMMAND
  --nodes = 2
  --ranks-per-node = 1
  --inter
  --intra
  --sites = 1
  --wan
gradwire import-cluster
  SOURCES
  --out
  --collective
gradwire import-profile
  SOURCE
  --out
  --batch
  --device
gradwire lighthouse
  --bind = 0.0.0.0:29510
  --min-replicas = 1
  --silence = 1.0
  --patience = 600.0
gradwire options
  --nodes
  --ranks-per-node
  --devices = gpu,cpu
  --max-encodes
  --schemes
  --flat
  --compressed
  --restrict
  --named
  --collectives
  --count
  --json
gradwire plan
  --cluster
  PROFILE
  --costs
  --spec
  --model
  --config
  --input
  --method = joint
  --devices
  --max-encodes
  --restrict
  --memory-mb
  --exempt-vectors = True
  --schedule = backward
  --decode-calls
  --out
  --inter
  --nodes
  --slow-node
  --picture
  --methods
  --json
gradwire profile
  --job
  --out = profile
  --spec
  --steps = 20
  --device = cpu
gradwire report
  RUN
  --out
  --tensorboard
gradwire schedules
  --json
gradwire simulate
  PLAN
  --profile
  --cluster
  --costs
  --trace
  --device
  --codec-on
  --decode
  --decode-calls
  --lanes
  --inter
  --nodes
  --slow-node
  --picture
  --json
"""


def describe(name, command):
    lines = [name]
    for parameter in command.params:
        word = parameter.opts[0] if parameter.param_type_name == "option" else (parameter.name or "").upper()
        plain = not isinstance(parameter.default, (str, int, float, Path)) or parameter.default is False
        lines.append(f"  {word}" if plain else f"  {word} = {parameter.default}")
    return lines


def test_options_are_frozen():
    root = typer.main.get_command(app)
    lines = describe("gradwire", root)
    for name in sorted(root.commands):
        lines += describe(f"gradwire {name}", root.commands[name])
    assert "\n".join(lines) + "\n" == OPTIONS


def test_every_option_is_explained():
    root = typer.main.get_command(app)
    for command in [root, *root.commands.values()]:
        assert command.help
        assert all(parameter.help for parameter in command.params if parameter.name != "help")


@pytest.fixture
def gradwire(interpreters):
    return lambda *arguments: interpreters.run([sys.executable, "-m", "gradwire", *arguments], timeout=120)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--help"], ("demo", "bench", "emulate")), (["options", "--named"], ("comp:gpu", "HiTopKComm"))],
)
def test_what_lists_does_not_import_torch(arguments, said):
    code = f"""if True:
        import sys
        from gradwire.cli import main
        sys.argv = ["gradwire", *{arguments}]
        try:
            main()
        except SystemExit:
            sys.exit(any(name in sys.modules for name in ("torch", "numpy", "matplotlib")))
    """
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert all(word in finished.stdout for word in said)


def test_bench_lets_methods_decide_before_it_measures(monkeypatch):
    asked = []
    monkeypatch.setattr("gradwire.bench.runner.run_bench", lambda request, *_: asked.append(request))
    monkeypatch.setattr("gradwire.bench.runner.emulation_problem", lambda: None)
    monkeypatch.setattr("gradwire.bench.table.print_run", lambda run: 0)
    assert CliRunner().invoke(app, ["bench", "--methods", "floor,gradwire:auto"]).exit_code == 0
    assert [each.deciding_steps for each in asked] == [MOST_DECIDING_STEPS]


def test_version(gradwire):
    finished = gradwire("--version")
    assert finished.returncode == 0
    assert finished.stdout == f"gradwire {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--methods", "allreduce"], "'allreduce'"),
        (["bench", "--methods", "gradwire:qsgd9"], "bits is 9"),
        (["bench", "--links", "5"], "'5'"),
        (["bench", "--jobs", ","], "no job"),
        (["emulate", "--", "no_such_script.py"], "no_such_script.py"),
        (["profile", "--job", "mlp"], "there is one rank"),
        (["options", "--restrict", "gp"], "did you mean 'gpu'?"),
        (["simulate", "no-plan.json", "--profile", "no-profile.json", "--cluster", "no.json"], "no-profile.json"),
        (["plan", "profile.json"], "there is no cluster to plan for. Pass --cluster"),
        (["import-profile", "no-such-file.json", "-o", "out.json"], "no-such-file.json"),
        (["import-profile", "no-such-file.csv", "-o", "out.json"], "no-such-file.csv: cannot be read"),
        (["doctor", "--flight", "no-such-file.json", "--json"], "--json has no effect with --flight"),
        (["import-cluster", "no-such-file.txt", "-o", "out.json"], "no-such-file.txt: cannot be read"),
    ],
)
def test_errors_are_one_message(gradwire, arguments, said):
    finished = gradwire(*arguments)
    assert finished.returncode == 2
    assert finished.stderr.startswith("gradwire: ")
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("command", ["--help", "--version", "compressors", "options", "plan nothing.json --cluster nothing.json"])
def test_a_full_output_is_one_message(command):
    words = [sys.executable, "-m", "gradwire", *command.split()]
    with open("/dev/full", "w") as full:
        places = subprocess.PIPE, full
        one, both = (subprocess.run(words, stdout=full, stderr=place, text=True, check=False) for place in places)
    assert (one.returncode, both.returncode) == (2, 2)
    told = "the output cannot be written: No space left on device." if "plan" not in command else "nothing.json: cannot be read"
    assert one.stderr.startswith(f"gradwire: {told}") and one.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["--version", "options"])
def test_a_reader_that_is_gone_is_no_error(command):
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "gradwire", *command.split()]
    finished = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (finished.returncode, finished.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--json", "nowhere/x.json"], "nowhere/x.json: cannot be written: there is no folder"),
        (["--nodes", "0", "--ranks-per-node", "0"], "nodes is 0"),
        (["--model", "timm:x", "--input", "1x2", "--jobs", "mlp"], "--jobs mlp has no effect with --model"),
        (
            ["--methods", "reduce-only:qsgd4"],
            "there is no method 'reduce-only:qsgd4'",
        ),
    ],
)
def test_what_bench_would_ignore_is_refused_before_anything_is_measured(gradwire, words, told):
    finished = gradwire("bench", *words)
    assert finished.returncode != 0
    assert told in " ".join(finished.stderr.split()), finished.stderr


@pytest.mark.parametrize("option", ["--silence", "--patience"])
@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan"])
def test_times_of_the_lighthouse_are_at_most_a_day(option, seconds):
    asked = CliRunner().invoke(app, ["lighthouse", option, seconds])
    assert asked.exit_code == 2
    assert "86400" in asked.output and "listen" not in asked.output


def test_emulate_without_a_script_is_a_usage_error(gradwire):
    finished = gradwire("emulate", "--nodes", "2")
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
