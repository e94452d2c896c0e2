"""Writing files: a reader sees the old file or the whole new one, never a part."""

import contextlib
import os
import secrets
from pathlib import Path

from gradwire.core.checks import printable
from gradwire.errors import WriteError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write the file in one step, text as UTF-8: to a temporary one beside it, on the disk, then in its place.

    A symbolic link keeps pointing to the file; what is no regular file, such as `/dev/stdout`, is written directly.
    Raises WriteError, an OSError, that names the file; an old file is as it was then, and no temporary one is left.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except FileNotFoundError as error:
        name = printable(os.fspath(path), longest=1024)
        raise WriteError(
            f"{name}: cannot be written: there is no folder {printable(str(target.parent))}. Make it."
        ) from error
    except OSError as error:
        name = printable(os.fspath(path), longest=1024)
        raise WriteError(
            f"{name}: cannot be written: {error.strerror or error}. What it held before is as it was. Make room, or choose "
            "another folder."
        ) from error


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made with those above it where there is none. Raises WriteError, an OSError, that names it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        name = printable(os.fspath(path), longest=1024)
        raise WriteError(
            f"{name}: no folder can be made there: {error.strerror or error}. Choose another one."
        ) from error
    return folder


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
