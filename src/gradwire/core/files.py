"""Writing files: a reader sees the old file or the whole new file, never a part. Reading text that people or tools wrote."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradwire.core.checks import printable
from gradwire.errors import FormatError, WriteError


def write_whole(path: str | os.PathLike[str], content: str | bytes, private: bool = False) -> None:
    """Write a temporary file in the target's folder, flush it to disk, and rename it to the target. Text is UTF-8.

    private: only this user may read a file that is made new. A file that is there keeps its mode; if it is another user's, others
    may not write the new one. A symbolic link still points to the target. Links that another user put into a folder where
    everybody may write are refused, also as folders on the way. A target that is no regular file, and an open file, such
    as `/dev/stdout`, is written directly: after what is there.
    Raises WriteError, an OSError, that names the file. The old file is then unchanged, and no temporary file is left.
    """
    name = printable(os.fspath(path), longest=1024)
    data = content.encode("utf-8") if isinstance(content, str) else content
    stream = _stream(path)
    target = Path(os.path.realpath(path) if stream is None else stream)
    with _saying_why(name, target, stream):
        _check_links(path, name)
        if stream is None:
            _replace(target, data, private)
        else:
            _append(stream, data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises WriteError where `write_whole` would, before the work whose result it is to write. Changes nothing."""
    name = printable(os.fspath(path), longest=1024)
    stream = _stream(path)
    target = Path(os.path.realpath(path) if stream is None else stream)
    with _saying_why(name, target, stream):
        _check_links(path, name)
        if stream is not None:
            _check_stream(stream)
        elif target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        else:
            with tempfile.TemporaryFile(dir=target.parent):
                pass


@contextlib.contextmanager
def _saying_why(name: str, target: Path, stream: str | None) -> Iterator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        why, cure = _why(error, target) if stream is None else (error.strerror or error, "Name a regular file.")
        raise WriteError(f"{name}: cannot be written: {why}. {cure}") from error


def _why(error: OSError, target: Path) -> tuple[object, str]:
    """Why the file cannot be written, and the cure."""
    folder, why = printable(str(target.parent)), error.strerror or error
    if isinstance(error, FileNotFoundError) and not target.parent.exists():
        return f"there is no folder {folder}", "Make it."
    if isinstance(error, FileNotFoundError):
        return f"{folder} takes no new files", "Choose another folder."
    if isinstance(error, IsADirectoryError):
        return why, "Name a file in it."
    unchanged = "The old file is unchanged. " if os.path.isfile(target) else ""
    return why, f"{unchanged}{'Make room, or choose' if error.errno in _NO_ROOM else 'Choose'} another folder."


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN_FILE = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd/(\d+)")
"""The path of a file that a process has open, such as that of `/dev/stdout`: the number of the process, and the file's."""
_MOST_LINKS = 40
"""Symbolic links that the kernel follows on the way to a file."""


def _stream(path: str | os.PathLike[str]) -> str | None:
    """The path to write to directly: of a file that a process has open, or of what is neither a regular file nor a folder. None:
    the path is that of a file which another one may replace.

    A link to an open file is not followed. It says the name of the file that the process opened, or of none, as of a pipe.
    """
    found = os.path.join(os.getcwd(), path)
    for _ in range(_MOST_LINKS):
        found = os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))
        if _OPEN_FILE.fullmatch(found):
            return found
        if not os.path.islink(found):
            break
        found = os.path.join(os.path.dirname(found), os.readlink(found))
    try:
        mode = os.stat(found).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else found


def _own(stream: str) -> int | None:
    """The number of an open file of this process; None for another path."""
    found = _OPEN_FILE.fullmatch(stream)
    return int(found[2]) if found and found[1] == os.path.basename(os.path.realpath("/proc/self")) else None


def _check_stream(stream: str) -> None:
    own = _own(stream)
    if own is None:
        os.stat(stream)
    elif fcntl.fcntl(own, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "it is open for reading alone")


def _append(stream: str, data: bytes) -> None:
    """Write after what is there, and after what was printed. An open file of this process keeps its place, so that what is
    printed later follows."""
    if sys.stdout is not None:
        sys.stdout.flush()
    own = _own(stream)
    with open(stream, "ab") if own is None else open(os.dup(own), "wb") as file:
        file.write(data)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file; invalid bytes become replacement characters. Raises FormatError without the file's name."""
    try:
        return Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise FormatError(f"cannot be read: {getattr(error, 'strerror', None) or error}. Check the path.") from error


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder and its parents if they are missing. Raises WriteError, an OSError, that names the folder: also for one
    behind a symbolic link that another user put into a folder where everybody may write."""
    folder = Path(path)
    _check_links(path, printable(os.fspath(path), longest=1024))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(
            f"{printable(os.fspath(path), longest=1024)}: no folder can be made there: {error.strerror or error}. Choose "
            "another one."
        ) from error
    return folder


def _check_links(path: str | os.PathLike[str], name: str) -> None:
    """Raises WriteError if the path, or a folder on the way to it, is a symbolic link of another user in a folder where everybody
    may write, as in /tmp."""
    whole = Path(os.path.abspath(path))
    for each in filter(os.path.islink, (whole, *whole.parents)):
        owner, folder = os.lstat(each).st_uid, os.stat(each.parent)
        if folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH and owner not in (os.geteuid(), folder.st_uid):
            what = "it" if each == whole else printable(str(each), longest=1024)
            raise WriteError(
                f"{name}: cannot be written: {what} is a symbolic link that user {owner} made in a folder where everybody may "
                "write, and it may point to a file of yours. Remove it, or choose another folder."
            )


def _replace(target: Path, data: bytes, private: bool) -> None:
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}")
    kept = _kept_mode(target.stat(), private) if target.exists() else None
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private or kept is not None else 0o666
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            if kept is not None:
                os.fchmod(file.fileno(), kept)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _kept_mode(status: os.stat_result, private: bool) -> int:
    """The mode of a file that takes the place of another. Of one that another user made, what lets others write is left out."""
    mode = stat.S_IMODE(status.st_mode)
    return mode if status.st_uid == os.geteuid() else mode & (0o600 if private else 0o755)


def _sync(folder: Path) -> None:
    """Flush the folder, so that the new name outlives a loss of power. Some file systems cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
