"""The shared library built from csrc/: the kernels and the planner's inner loops, behind a plain C interface."""

import ctypes
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "_native.so"


@cache
def library() -> ctypes.CDLL:
    """The library, loaded once. Raises OSError with the reason if the library was not built or does not load."""
    if not LIBRARY.exists():
        raise OSError(f"{LIBRARY.name} was not built: GRADWIRE_REFERENCE_ONLY=1 was set, or this checkout was never installed")
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise OSError(f"{LIBRARY.name} does not load: {error}") from None
