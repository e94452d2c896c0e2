"""The provenance of numbers names the program and no secret."""

import pytest

from gradwire.core.provenance import without_secrets

SECRETS = [
    "--hf-token",
    "hf_123",
    "--db=postgres://me:hunter2@host/db",
    "--api-key=k1",
    "PASSWORD=p1",
    "--password",
    "p2",
]
PLAIN = ["--lr", "0.1", "--keys=3"]


@pytest.mark.parametrize("start", [["python", "-u", "train.py"], ["python", "-X", "dev", "-m", "my.train"]])
def test_of_a_script_only_its_name_is_kept(start: list[str]) -> None:
    assert without_secrets([*start, *SECRETS, *PLAIN]) == start


def test_arguments_that_are_asked_for_come_without_secrets() -> None:
    kept = without_secrets(["python", "train.py", *SECRETS, *PLAIN], all_words=True)
    assert kept == [
        "python", "train.py", "--hf-token", "...", "--db=postgres://...@host/db", "--api-key=...", "PASSWORD=...", "--password",
        "...", "--lr", "0.1", "--keys=3",
    ]  # fmt: skip


def test_commands_of_gradwire_keep_their_arguments() -> None:
    for command in (["python", "/bin/gradwire", "bench"], ["python", "-m", "gradwire", "profile"]):
        assert without_secrets([*command, "--links", "100mbit"]) == [*command, "--links", "100mbit"]


def test_code_on_the_command_line_is_left_out() -> None:
    assert without_secrets(["python", "-c", "login('hf_123')", "more"]) == ["python", "-c", "..."]
    assert without_secrets(["python"]) == ["python"]


def test_tokens_are_known_by_their_beginning() -> None:
    words = [
        "train.py",
        "--hub",
        "hf_AbCdEfGhIjKl",
        "--header=Bearer sk-proj-0123456789",
        "--name",
        "hf_base",
        "--id",
        "AKIA0123456789ABCDEF",
    ]
    kept = without_secrets(["python", *words], all_words=True)
    assert kept == ["python", "train.py", "--hub", "...", "--header=Bearer ...", "--name", "hf_base", "--id", "..."]
