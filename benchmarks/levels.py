"""SIMD levels of the C++ kernels: all kernels of a build, and one level for the whole process."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gradwire.core import native
from gradwire.kernels import cpu


def kernels_of(library: ctypes.CDLL) -> dict[str, Callable[..., None]]:
    """All kernels of a build of csrc/, by name."""
    return {name: cpu.bind(library, name, *arguments) for name, arguments in cpu.ARGUMENTS.items()}


def set_level(library: ctypes.CDLL, index: int) -> None:
    """Run the kernels of a build at a level of `cpu.levels()`, by its number."""
    cpu.bind(library, "set_level", ctypes.c_int64)(index)


@contextmanager
def use_level(level: str) -> Iterator[None]:
    """Run everything inside at one SIMD level."""
    levels = cpu.levels()
    if level not in levels:
        raise ValueError(f"SIMD level {level!r} does not run here: use one of {', '.join(levels)}.")
    set_level(native.library(), levels.index(level))
    try:
        yield
    finally:
        set_level(native.library(), len(levels) - 1)
