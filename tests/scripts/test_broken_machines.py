"""Machines on which something is missing, odd or in the way: a sentence each, and no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.core.provenance import Made
from gradwire.doctor.facts import Facts, GlooChoice, Interface, bindable_address
from gradwire.doctor.links import Direction, rate_text
from gradwire.doctor.machine import machine_findings
from gradwire.doctor.meeting import Survey
from gradwire.doctor.ranks import survey_findings
from gradwire.errors import TestbedError, WriteError
from gradwire.testbed.supervisor import print_with_prefix

BLOCKED = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise {error}
sys.meta_path.insert(0, Blocked())
sys.argv = ["gradwire", *{arguments!r}]
from gradwire.cli import main
main()
"""


def without(names: list[str], error: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(names=names, error=error, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("error", ["ModuleNotFoundError('No module named torch')", "ValueError('libcublas not found')"])
def test_the_doctor_says_that_torch_cannot_be_used(error: str) -> None:
    ended = without(["torch"], error, "doctor")
    assert "Traceback" not in ended.stderr, ended.stderr
    assert error.partition("('")[0] in ended.stdout and ended.returncode == 1


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_missing_extra_is_named_before_anything_runs(command: str, tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'sklearn' else find(name, *more)\n"
        f"sys.argv = ['gradwire', {command!r}]\n"
        "from gradwire.cli import main\nmain()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == 2 and "this command needs sklearn" in ended.stderr
    assert "pip install '.[bench]'" in ended.stderr and not list(tmp_path.iterdir())


LO = Interface("lo", "127.0.0.1")
LINK_LOCAL, DOCKER = Interface("wlan0", "fe80::1"), Interface("docker0", "172.17.0.1")
ETH = Interface("eth1", "10.0.0.5")


@pytest.mark.parametrize("first", [LINK_LOCAL, DOCKER])
def test_the_interface_that_is_named_leads_to_other_machines(first: Interface) -> None:
    facts = Facts(interfaces=(LO, first, ETH), gloo=GlooChoice("127.0.0.1", "lo", "the host name"))
    (finding,) = [each for each in machine_findings(facts) if each.topic == "interface"]
    assert "GLOO_SOCKET_IFNAME=eth1 " in finding.cure and first.name in finding.cure


def test_no_interface_is_made_up() -> None:
    facts = Facts(interfaces=(LO,), gloo=GlooChoice("127.0.0.1", "lo", "the host name"))
    (finding,) = [each for each in machine_findings(facts) if each.topic == "interface"]
    assert "eth0" not in finding.cure and "any interface of this node" in finding.cure


def test_names_that_no_host_can_have_do_not_resolve() -> None:
    assert bindable_address("h" * 64) is None and bindable_address("a..b") is None


@pytest.mark.parametrize(
    ("gbps", "words"),
    [
        (0.0996, "100 Mb/s"),
        (0.99996, "1 Gb/s"),
        (999.6, "1000 Gb/s"),
        (0.00996, "10 Mb/s"),
        (0.0098, "9.8 Mb/s"),
        (12.345, "12.3 Gb/s"),
        (0.4784, "478 Mb/s"),
    ],
)
def test_rates_are_written_out(gbps: float, words: str) -> None:
    assert rate_text(gbps) == words


def test_two_directions_that_are_equally_fast_are_no_problem() -> None:
    facts = {rank: Facts(rank=rank, host=f"node{rank}", local_world_size=1) for rank in (0, 1)}
    directions = [Direction(source=a, destination=b, round_trip_us=100.0, gbps=1.0) for a, b in ((0, 1), (1, 0))]
    found = survey_findings(Survey(present=facts, directions=directions), 2, 10.0)
    assert not [each for each in found if "slower than" in each.found]


def test_what_a_rank_says_is_printed_whatever_the_terminal_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        print_with_prefix(1, "stdout", "h\xe9llo")
    assert (tmp_path / "out").read_text() == "[1] h\\xe9llo\n"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(TestbedError, match="the output of rank 0 cannot be printed"):
            print_with_prefix(0, "stdout", "hello")
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()


def test_a_command_with_bytes_that_are_no_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "caf\udce9"])
    made = Made.now()
    assert "caf" in made.command and made.command.encode("utf-8")


def test_a_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    from gradwire.core.files import make_folder

    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="no folder can be made there"):
        make_folder(tmp_path / "file" / "below")
