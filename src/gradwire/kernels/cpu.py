"""The C++ kernels of csrc/, through torch ops that release the GIL. One thread each; same bytes at every SIMD level."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gradwire.kernels.segments import Segments

__all__ = [
    "available",
    "cast_decode",
    "cast_encode",
    "exponential_decode",
    "exponential_encode",
    "fp8_decode",
    "fp8_encode",
    "levels",
    "natural_decode",
    "natural_encode",
    "qsgd_decode",
    "qsgd_encode",
    "use_level",
]

LIBRARY = Path(__file__).with_name("_kernels.so")
_SCALES = {"max": 0, "minmax": 1, "l2": 2}
_ROUNDINGS = {"stochastic": 0, "nearest": 1}
_WIRES = {torch.bfloat16: 1, torch.float16: 2}
_CODES = {"e4m3": 0, "e5m2": 1, "natural": 2, "exponential": 3}


@functools.cache
def available() -> str | None:
    """None when the kernels are loaded, else why they are not."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built (no g++ when gradwire was installed?)"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"{LIBRARY.name} does not load: {error}"
    return None


@functools.cache
def levels() -> tuple[str, ...]:
    """Names of the SIMD levels that run on this machine, slowest first; the last is the default."""
    available()
    name = ctypes.CDLL(str(LIBRARY)).gradwire_level_name
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int64]
    return tuple(name(index).decode() for index in range(torch.ops.gradwire.level_count()))


@contextmanager
def use_level(level: str) -> Iterator[None]:
    """Run everything inside at one SIMD level (the whole process: for tests and benchmarks)."""
    if level not in levels():
        raise ValueError(f"SIMD level {level!r} does not run here: use one of {', '.join(levels())}.")
    torch.ops.gradwire.set_level(levels().index(level))
    try:
        yield
    finally:
        torch.ops.gradwire.set_level(len(levels()) - 1)


def qsgd_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: torch.Tensor,
) -> None:
    """As `reference.qsgd_encode`, at the speed of memory."""
    torch.ops.gradwire.qsgd_encode(
        src, residual, segments.table, stream, block, _SCALES[scale], _ROUNDINGS[rounding], payload
    )


def qsgd_decode(
    payload: torch.Tensor, segments: Segments, block: int, scale: str, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.qsgd_decode`."""
    torch.ops.gradwire.qsgd_decode(payload, segments.table, block, _SCALES[scale], add, dst)


def cast_encode(src: torch.Tensor, residual: torch.Tensor | None, wire: torch.dtype, payload: torch.Tensor) -> None:
    """As `reference.cast_encode`."""
    torch.ops.gradwire.cast_encode(src, residual, _WIRES[wire], payload)


def cast_decode(payload: torch.Tensor, wire: torch.dtype, add: bool, dst: torch.Tensor) -> None:
    """As `reference.cast_decode`."""
    torch.ops.gradwire.cast_decode(payload, _WIRES[wire], add, dst)


def fp8_encode(
    src: torch.Tensor, residual: torch.Tensor | None, segments: Segments, block: int, format: str, payload: torch.Tensor
) -> None:
    """As `reference.fp8_encode`."""
    stream = torch.zeros(4, dtype=torch.int64)
    torch.ops.gradwire.scaled_encode(src, residual, segments.table, stream, _CODES[format], block, 0, 1, payload)


def fp8_decode(
    payload: torch.Tensor, segments: Segments, block: int, format: str, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.fp8_decode`."""
    torch.ops.gradwire.scaled_decode(payload, segments.table, _CODES[format], block, add, dst)


def natural_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    payload: torch.Tensor,
) -> None:
    """As `reference.natural_encode`."""
    code = _CODES["natural"]
    torch.ops.gradwire.scaled_encode(src, residual, segments.table, stream, code, block, 0, 0, payload)


def natural_decode(payload: torch.Tensor, segments: Segments, block: int, add: bool, dst: torch.Tensor) -> None:
    """As `reference.natural_decode`."""
    torch.ops.gradwire.scaled_decode(payload, segments.table, _CODES["natural"], block, add, dst)


def exponential_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    scale: str,
    rounding: str,
    payload: torch.Tensor,
) -> None:
    """As `reference.exponential_encode`."""
    torch.ops.gradwire.scaled_encode(
        src,
        residual,
        segments.table,
        stream,
        _CODES["exponential"],
        block,
        _SCALES[scale],
        _ROUNDINGS[rounding],
        payload,
    )


def exponential_decode(payload: torch.Tensor, segments: Segments, block: int, add: bool, dst: torch.Tensor) -> None:
    """As `reference.exponential_decode`."""
    torch.ops.gradwire.scaled_decode(payload, segments.table, _CODES["exponential"], block, add, dst)
