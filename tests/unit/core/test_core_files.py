"""Files are written whole or not at all, and the error says which file and why."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.core import Cluster, Link
from gradwire.core.files import check_writable, make_folder, write_whole
from gradwire.errors import GradwireError, WriteError

CLUSTER = Cluster(nodes=2, ranks_per_node=4, intra=Link(5.0, 400.0), inter=Link(30.0, 25.0))

# A process that may write files of 4 KiB and no more: the kernel fails the write, as on a full disk.
LIMITED = """
import resource, signal, sys
from gradwire.core.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_whole(sys.argv[1], b"a" * 4096)
try:
    write_whole(sys.argv[1], b"b" * 4097)
except OSError as error:
    print(type(error).__name__, error)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        check_writable(tmp_path / name)
    assert contents(tmp_path) == {"old.json": b"old"}
    with pytest.raises(WriteError, match=r"no folder .*none.*Make it"):
        check_writable(tmp_path / "none" / "new.json")
    with pytest.raises(WriteError, match=r"cannot be written: Is a directory\. Name a file in it\.$"):
        check_writable(tmp_path)
    with pytest.raises(WriteError, match=r"cannot be written: Not a directory\. Choose another folder\.$"):
        check_writable(tmp_path / "old.json" / "new.json")
    with pytest.raises(WriteError, match=r"cannot be written: File name too long\."):
        check_writable(tmp_path / ("x" * 300))


def test_a_write_that_the_kernel_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"WriteError {path}: cannot be written: File too large.")
    assert contents(tmp_path) == {"plan.json": b"a" * 4096}


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A folder that holds 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a file system of its own cannot be mounted here; the limit on a file's size is tested")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    path = small_disk / "cluster.json"
    CLUSTER.save(path)
    old = contents(small_disk)
    with pytest.raises(WriteError, match=r"cluster\.json: cannot be written: No space left on device\..*unchanged"):
        write_whole(path, b"b" * 2**20)
    with pytest.raises(WriteError, match=r"No space left on device\. Make room, or choose another folder\.$"):
        write_whole(small_disk / "new.json", b"b" * 2**20)
    assert contents(small_disk) == old
    (small_disk / "other").write_bytes(b"c" * (2**16 - 4096))
    with pytest.raises(WriteError, match="No space left"):
        CLUSTER.save(path)
    (small_disk / "other").unlink()
    assert contents(small_disk) == old
    assert Cluster.load(path) == CLUSTER


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_fails_leaves_the_old_file(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt):
        CLUSTER.save(path)
    assert contents(tmp_path) == {"cluster.json": b"old"}


def test_the_error_is_ours_and_python_s(tmp_path: Path) -> None:
    for path, why in [
        (tmp_path / "no" / "such.json", f"there is no folder {tmp_path / 'no'}. Make it"),
        (tmp_path, "Is a directory"),
    ]:
        with pytest.raises(WriteError) as caught:
            CLUSTER.save(path)
        assert isinstance(caught.value, GradwireError) and isinstance(caught.value, OSError)
        assert str(caught.value).startswith(f"{path}: cannot be written: {why}")
    assert contents(tmp_path) == {}


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (done.append(name), real(*a)))
    write_whole(tmp_path / "file", "text \N{SNOWMAN}")
    assert done == ["fsync", "replace", "fsync"], "the last one is of the folder"
    assert contents(tmp_path) == {"file": "text \N{SNOWMAN}".encode()}


def test_long_names_links_and_devices(tmp_path: Path) -> None:
    write_whole(tmp_path / ("\N{SNOWMAN}" * 85), b"long")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"long"]
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write_whole(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    write_whole(os.devnull, b"gone")
    assert not Path(os.devnull).is_file()


# A process that prints before and after it writes to its output, by any name of it.
PRINTS = """
import sys
from gradwire.core.files import check_writable, write_whole
check_writable(sys.argv[1])
print("before")
write_whole(sys.argv[1], "written\\n")
print("after")
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "a link"])
def test_what_is_written_to_an_open_file_follows_what_is_there(tmp_path: Path, name: str) -> None:
    """As in `gradwire plan ... -o /dev/stdout >> log.txt`, and with `>` and `|`."""
    if name == "a link":
        name = str(tmp_path / "link")
        os.symlink("/dev/stdout", name)
    command, log, printed = [sys.executable, "-c", PRINTS, name], tmp_path / "log.txt", "before\nwritten\nafter\n"
    log.write_text("precious\n")
    with log.open("a") as file:
        subprocess.run(command, stdout=file, check=True)
    assert log.read_text() == "precious\n" + printed
    with log.open("w") as file:
        subprocess.run(command, stdout=file, check=True)
    assert log.read_text() == printed
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == printed


def test_pipes_and_what_nothing_can_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reads, writes = os.pipe()
    for target in (f"/dev/fd/{writes}", tmp_path / "fifo"):
        check_writable(target)
    with open(os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb") as fifo:
        write_whole(tmp_path / "fifo", b"first")
        assert fifo.read() == b"first"
    write_whole(f"/dev/fd/{writes}", b"second")
    assert os.read(reads, 9) == b"second"
    for name, told in [
        (f"/dev/fd/{reads}", "it is open for reading alone. Name a regular file."),
        ("/dev/fd/987", "Bad file descriptor. Name a regular file."),
        ("/proc/x.json", "/proc takes no new files. Choose another folder."),
        ("/proc/nothing/x.json", "there is no folder /proc/nothing. Make it."),
    ]:
        with pytest.raises(WriteError) as caught:
            check_writable(name)
        assert str(caught.value) == f"{name}: cannot be written: {told}"
    os.close(reads)
    os.close(writes)


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    mask = os.umask(0o022)
    try:
        write_whole(path, b"")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_keeps_its_mode_and_a_private_one_is_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "open", b"first")
        write_whole(tmp_path / "private", b"first", private=True)
        assert (mode_of(tmp_path / "open"), mode_of(tmp_path / "private")) == (0o644, 0o600)
        for mode in (0o600, 0o640, 0o664):
            (tmp_path / "open").chmod(mode)
            write_whole(tmp_path / "open", b"second")
            assert mode_of(tmp_path / "open") == mode and (tmp_path / "open").read_bytes() == b"second"
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
def test_a_link_that_another_user_put_into_a_shared_folder_is_refused(tmp_path: Path) -> None:
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.write_bytes(b"precious")
    (shared / "cluster.json").symlink_to(victim)
    os.lchown(shared / "cluster.json", 12345, 12345)
    with pytest.raises(WriteError, match="a symbolic link that user 12345 made in a folder where everybody may write"):
        CLUSTER.save(shared / "cluster.json")
    assert victim.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
def test_a_folder_behind_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    for folder in (shared, theirs):
        folder.mkdir()
    shared.chmod(0o1777)
    (shared / "runs").symlink_to(theirs)
    os.lchown(shared / "runs", 12345, 12345)
    with pytest.raises(WriteError, match=r"shared/runs is a symbolic link that user 12345 made"):
        CLUSTER.save(shared / "runs" / "cluster.json")
    with pytest.raises(WriteError, match=r"shared/runs is a symbolic link"):
        make_folder(shared / "runs" / "mine")
    assert not list(theirs.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write in place of another user's file")
@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_file_that_another_user_made_does_not_decide_who_may_write(tmp_path: Path, private: bool, mode: int) -> None:
    path = tmp_path / "run.json"
    path.touch()
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    write_whole(path, b"mine", private=private)
    assert mode_of(path) == mode
