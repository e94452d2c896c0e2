"""The flight recorder: what ranks write when a step fails, and what the doctor says of it."""

import re
from pathlib import Path

import pytest
from test_damage import step_with_a_flip
from typer.testing import CliRunner
from worlds import Worlds

import gradwire as gw
from gradwire.cli import app
from gradwire.doctor.flight import behind
from gradwire.errors import FormatError
from gradwire.transport.flight import FILES, STEPS, Flight, FlightRecord


def record(rank: int, step: int, ended: int, open_task: str = "") -> FlightRecord:
    """Of two ranks: so many tasks ended in this step, and one did not."""
    flight = Flight(rank, (0, 1), "made-up")
    for number in range(step + 1):
        flight.begin(number)
    for number in range(ended):
        flight.doing("bucket", number).done()
    if open_task:
        flight.doing(open_task)
    return FlightRecord.load(flight.write("as ordered"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADWIRE_FLIGHT_DIR", str(tmp_path))
    return tmp_path


def test_who_was_behind() -> None:
    fast, slow = record(0, 7, 4, "bucket 4"), record(1, 7, 1)
    first, *each = behind([fast, slow])
    assert first.startswith("rank 1 was behind: step 7, 1 tasks done, in no task")
    assert "rank 0: step 7, 4 tasks done, bucket 4 for" in each[0] and "as ordered" in each[0]
    assert behind([fast])[0].startswith("rank 1 wrote no record")
    assert behind([fast, record(1, 7, 4, "bucket 4")])[0].startswith("no rank was behind")
    assert behind([fast, record(1, 6, 9)])[0].startswith("rank 1 was behind: step 6")


def test_records_of_more_than_one_failure_are_refused() -> None:
    first, later = record(0, 7, 4), record(0, 9, 4)
    with pytest.raises(FormatError, match=r"rank 0 has 2 records.*names agree between `gradwire-flight-` and `-rank`"):
        behind([first, record(1, 7, 1), later])
    of_three = FlightRecord.load(Flight(1, (0, 1, 2), "other").write("as ordered"))
    with pytest.raises(FormatError, match="two groups, ranks 0, 1 and ranks 0 to 2"):
        behind([first, of_three])


def test_the_last_steps_are_kept() -> None:
    steps = record(0, 3 * STEPS, 0).steps
    assert [step.step for step in steps] == [*range(2 * STEPS + 1, 3 * STEPS + 1)]


def test_by_default_files_lie_in_a_folder_of_this_user_and_the_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_FLIGHT_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = [Flight(0, (0, 1), f"job{number}").write("as ordered") for number in range(FILES + 3)]
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and paths[-1].stat().st_mode & 0o777 == 0o600
    assert len(list(folder.iterdir())) == FILES and paths[-1].exists() and not paths[0].exists()
    folder.chmod(0o777)
    other = Flight(0, (0, 1), "job").write("as ordered").parent
    assert other != folder and other.stat().st_mode & 0o777 == 0o700, "whoever may write there may put links there"


def test_a_step_that_fails_is_written(worlds: Worlds, folder: Path) -> None:
    errors = [error for error, *_ in worlds.run(2, step_with_a_flip, gw.QSGD(bits=4), 1, True, 3)]
    files = [re.search(r"What lanes did is in (\S+)\.$", error)[1] for error in errors]  # type: ignore[index]
    records = [FlightRecord.load(file) for file in files]
    assert [record.rank for record in records] == [0, 1]
    for each in records:
        assert [step.step for step in each.steps] == [0, 1, 2, 3]
        ended = {task.what for task in each.steps[2].tasks if task.ended_s}
        assert ended == {"bucket 0 chunk 0 alltoall", "bucket 0 chunk 0 allgather", "control exchange"}
    told = CliRunner().invoke(app, ["doctor", "--flight", *files])
    assert told.exit_code == 0, told.output
    assert "rank 1 was behind: step 3, 1 tasks done" in told.output.replace("\n", " ")
    assert "bucket 0 chunk 0 allgather for" in told.output and "changed on their way" in told.output
