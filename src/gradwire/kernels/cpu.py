"""The C++ kernels of csrc/, through torch ops that release the GIL. One thread each; same bytes at every SIMD level."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gradwire.kernels.local import LocalUpdate
from gradwire.kernels.segments import Segments

__all__ = [
    "available",
    "back_project",
    "block_topk_decode",
    "block_topk_encode",
    "cast_decode",
    "cast_encode",
    "dgc_encode",
    "exponential_decode",
    "exponential_encode",
    "fp8_decode",
    "fp8_encode",
    "gather_random",
    "levels",
    "local_update",
    "mean_sign_encode",
    "natural_decode",
    "natural_encode",
    "orthogonalise",
    "project",
    "qsgd_decode",
    "qsgd_encode",
    "randomk_decode",
    "randomk_encode",
    "reconstruct",
    "scatter_random",
    "sign_decode",
    "sign_encode",
    "terngrad_encode",
    "threshold_decode",
    "threshold_encode",
    "topk_decode",
    "topk_encode",
    "use_level",
]

LIBRARY = Path(__file__).with_name("_kernels.so")
_SCALES = {"max": 0, "minmax": 1, "l2": 2}
_ROUNDINGS = {"stochastic": 0, "nearest": 1}
_WIRES = {torch.bfloat16: 1, torch.float16: 2}
_VALUES = {torch.float32: 0} | _WIRES
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


def project(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    matrices: torch.Tensor,
    rank: int,
    q: torch.Tensor,
    p: torch.Tensor,
) -> None:
    """As `reference.project`, sums taken in another order."""
    torch.ops.gradwire.project(src, residual, matrices, rank, q, p)


def back_project(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    matrices: torch.Tensor,
    rank: int,
    p: torch.Tensor,
    q: torch.Tensor,
) -> None:
    """As `reference.back_project`, sums taken in another order."""
    torch.ops.gradwire.back_project(src, residual, matrices, rank, p, q)


def orthogonalise(matrices: torch.Tensor, rank: int, p: torch.Tensor) -> None:
    """As `reference.orthogonalise`; the same bits on every machine."""
    torch.ops.gradwire.orthogonalise(matrices, rank, p)


def reconstruct(
    dst: torch.Tensor,
    residual: torch.Tensor | None,
    matrices: torch.Tensor,
    rank: int,
    p: torch.Tensor,
    q_sum: torch.Tensor,
    q_own: torch.Tensor,
) -> None:
    """As `reference.reconstruct`; the same bits on every machine."""
    torch.ops.gradwire.reconstruct(dst, residual, matrices, rank, p, q_sum, q_own)


def topk_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    ratio: float,
    together: bool,
    threshold: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.topk_encode`, in one pass."""
    torch.ops.gradwire.topk_encode(src, residual, segments.table, ratio, together, threshold, payload)


def dgc_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    momentum: torch.Tensor | None,
    segments: Segments,
    ratio: float,
    decay: float,
    bound: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.dgc_encode`, in one pass, and one before for a bound."""
    torch.ops.gradwire.dgc_encode(src, residual, momentum, segments.table, ratio, decay, bound, payload)


def topk_decode(
    payload: torch.Tensor,
    segments: Segments,
    dtype: torch.dtype,
    ratio: float,
    together: bool,
    add: bool,
    dst: torch.Tensor,
) -> None:
    """As `reference.topk_decode`."""
    torch.ops.gradwire.topk_decode(payload, segments.table, _VALUES[dtype], ratio, together, add, dst)


def block_topk_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    ratio: float,
    block: int,
    payload: torch.Tensor,
) -> None:
    """As `reference.block_topk_encode`."""
    torch.ops.gradwire.block_topk_encode(src, residual, segments.table, ratio, block, payload)


def block_topk_decode(
    payload: torch.Tensor,
    segments: Segments,
    dtype: torch.dtype,
    ratio: float,
    block: int,
    add: bool,
    dst: torch.Tensor,
) -> None:
    """As `reference.block_topk_decode`."""
    torch.ops.gradwire.block_topk_decode(payload, segments.table, _VALUES[dtype], ratio, block, add, dst)


def randomk_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    ratio: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.randomk_encode`, at the speed of memory."""
    torch.ops.gradwire.randomk_encode(src, residual, segments.table, stream, ratio, payload)


def randomk_decode(
    payload: torch.Tensor, segments: Segments, dtype: torch.dtype, ratio: float, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.randomk_decode`."""
    torch.ops.gradwire.randomk_decode(payload, segments.table, _VALUES[dtype], ratio, add, dst)


def gather_random(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    ratio: float,
    values: torch.Tensor,
) -> None:
    """As `reference.gather_random`, at the speed of memory."""
    torch.ops.gradwire.gather_random(src, residual, segments.table, stream, ratio, values.view(torch.uint8))


def scatter_random(
    values: torch.Tensor, segments: Segments, stream: torch.Tensor, ratio: float, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.scatter_random`."""
    torch.ops.gradwire.scatter_random(values.view(torch.uint8), segments.table, stream, ratio, add, dst)


def sign_encode(
    src: torch.Tensor, momentum: torch.Tensor | None, keep: float, segments: Segments, payload: torch.Tensor
) -> None:
    """As `reference.sign_encode`, at the speed of memory."""
    torch.ops.gradwire.sign_encode(src, momentum, keep, segments.table, payload)


def mean_sign_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    block: int,
    means: int,
    payload: torch.Tensor,
) -> None:
    """As `reference.mean_sign_encode`, at the speed of memory."""
    torch.ops.gradwire.mean_sign_encode(src, residual, segments.table, block, means, payload)


def sign_decode(
    payload: torch.Tensor, segments: Segments, block: int, means: int, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.sign_decode`."""
    torch.ops.gradwire.sign_decode(payload, segments.table, block, means, add, dst)


def threshold_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    block: int,
    threshold: float,
    multiple: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.threshold_encode`, at the speed of memory."""
    torch.ops.gradwire.threshold_encode(src, residual, segments.table, block, threshold, multiple, payload)


def threshold_decode(
    payload: torch.Tensor, segments: Segments, block: int, threshold: float, add: bool, dst: torch.Tensor
) -> None:
    """As `reference.threshold_decode`."""
    torch.ops.gradwire.threshold_decode(payload, segments.table, block, threshold, add, dst)


def terngrad_encode(
    src: torch.Tensor,
    residual: torch.Tensor | None,
    segments: Segments,
    stream: torch.Tensor,
    block: int,
    clip: float,
    payload: torch.Tensor,
) -> None:
    """As `reference.terngrad_encode`."""
    torch.ops.gradwire.terngrad_encode(src, residual, segments.table, stream, block, clip, payload)


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


def local_update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    squares: torch.Tensor | None,
    mean: torch.Tensor | None,
    by: LocalUpdate,
    out: torch.Tensor,
) -> None:
    """As `reference.local_update`, in one pass."""
    torch.ops.gradwire.local_update(weight, gradient, squares, mean, *by, out)
