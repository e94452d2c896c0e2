"""The C++ kernels of csrc/, through ctypes, which releases the GIL. The same bytes at every SIMD level.

Each function has the name, the results and the arguments (by position) of the function in `gradwire.kernels.reference`. A
function raises RuntimeError for unsuitable tensors, and ctypes.ArgumentError for arguments that are no CPU tensors. All functions
run on one thread, except `local_update`, which uses torch's threads. The library depends on neither Python nor torch, so one
build serves all versions.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from ctypes import byref, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from gradwire.core import native
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.segments import Segments

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.uint8: 4}


class Tensor(ctypes.Structure):
    """An argument that is a tensor on the CPU. Twin of `Tensor` in csrc/api.hpp."""

    _fields_ = (("data", c_void_p), ("numel", c_int64), ("dtype", c_int32), ("contiguous", c_int32))

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a kernel takes a tensor here, not {tensor!r}")
        if not tensor.is_cpu:
            raise TypeError(f"the C++ kernels take tensors on the CPU, not on {tensor.device}")
        dtype = _DTYPES.get(tensor.dtype, -1)
        return byref(cls(tensor.data_ptr(), tensor.numel(), dtype, tensor.is_contiguous()))


class Maybe:
    """An argument that is a tensor, or None."""

    @staticmethod
    def from_param(tensor: Any) -> Any:
        return None if tensor is None else Tensor.from_param(tensor)


class Table:
    """An argument that is Segments."""

    @staticmethod
    def from_param(segments: Segments) -> Any:
        return Tensor.from_param(segments.table)


class Update(ctypes.Structure):
    """An argument that is a LocalUpdate. Twin of `Update` in csrc/api_weights.cpp."""

    _fields_ = (*((name, c_float) for name in LocalUpdate._fields), ("threads", c_int64))

    @classmethod
    def from_param(cls, by: LocalUpdate) -> Any:
        return byref(cls(*by, torch.get_num_threads()))


def _one_of(**numbers: int) -> type:
    """The type of an argument that is one of these words."""

    class Word:
        @staticmethod
        def from_param(word: str) -> c_int64:
            return c_int64(numbers[word])

    return Word


class Dtype:
    """An argument that is a dtype of payloads."""

    @staticmethod
    def from_param(dtype: torch.dtype) -> c_int64:
        return c_int64(_DTYPES[dtype])


Scale = _one_of(max=0, minmax=1, l2=2)
Rounding = _one_of(stochastic=0, nearest=1)
Format = _one_of(e4m3=0, e5m2=1)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "back_project": (Tensor, Maybe, Tensor, c_int64, Tensor, Tensor),
    "block_topk_decode": (Tensor, Table, Dtype, c_double, c_int64, c_bool, Tensor),
    "block_topk_encode": (Tensor, Maybe, Table, c_double, c_int64, Tensor),
    "cast_decode": (Tensor, Dtype, c_bool, Tensor),
    "cast_encode": (Tensor, Maybe, Dtype, Tensor),
    "dgc_encode": (Tensor, Maybe, Maybe, Table, c_double, c_double, c_double, Tensor),
    "exponential_decode": (Tensor, Table, c_int64, c_bool, Tensor),
    "exponential_encode": (Tensor, Maybe, Table, Tensor, c_int64, Scale, Rounding, Tensor),
    "fp8_decode": (Tensor, Table, c_int64, Format, c_bool, Tensor),
    "fp8_encode": (Tensor, Maybe, Table, c_int64, Format, Tensor),
    "gather_random": (Tensor, Maybe, Table, Tensor, c_double, Tensor),
    "local_update": (Tensor, Tensor, Maybe, Maybe, Update, Tensor),
    "mean_sign_encode": (Tensor, Maybe, Table, c_int64, c_int64, Tensor),
    "natural_decode": (Tensor, Table, c_int64, c_bool, Tensor),
    "natural_encode": (Tensor, Maybe, Table, Tensor, c_int64, Tensor),
    "orthogonalise": (Tensor, c_int64, Tensor),
    "project": (Tensor, Maybe, Tensor, c_int64, Tensor, Tensor),
    "qsgd_decode": (Tensor, Table, c_int64, Scale, c_bool, Tensor),
    "qsgd_encode": (Tensor, Maybe, Table, Tensor, c_int64, Scale, Rounding, Tensor),
    "randomk_decode": (Tensor, Table, Dtype, c_double, c_bool, Tensor),
    "randomk_encode": (Tensor, Maybe, Table, Tensor, c_double, Tensor),
    "reconstruct": (Tensor, Maybe, Tensor, c_int64, Tensor, Tensor, Tensor),
    "scatter_random": (Tensor, Table, Tensor, c_double, c_bool, Tensor),
    "sign_decode": (Tensor, Table, c_int64, c_int64, c_bool, Tensor),
    "sign_encode": (Tensor, Maybe, c_double, Table, Tensor),
    "terngrad_encode": (Tensor, Maybe, Table, Tensor, c_int64, c_double, Tensor),
    "threshold_decode": (Tensor, Table, c_int64, c_double, c_bool, Tensor),
    "threshold_encode": (Tensor, Maybe, Table, c_int64, c_double, c_double, Tensor),
    "topk_decode": (Tensor, Table, Dtype, c_double, c_bool, c_bool, Tensor),
    "topk_encode": (Tensor, Maybe, Table, c_double, c_bool, c_double, Tensor),
}


def __getattr__(name: str) -> Callable[..., None]:
    """A kernel, when it is first asked for."""
    if name not in ARGUMENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kernel = globals()[name] = bind(native.library(), name, *ARGUMENTS[name])
    return kernel


def bind(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of a library. The function raises RuntimeError if it refuses its arguments."""
    function = library[f"gw_{name}"]
    function.argtypes, function.restype = arguments, ctypes.c_char_p
    function.errcheck = _refused  # type: ignore[assignment]  # typeshed wants a C type back
    function.__name__ = name
    kernel: Callable[..., None] = function
    return kernel


def _refused(words: bytes | None, *_: object) -> None:
    if words is not None:
        raise RuntimeError(words.decode())


@functools.cache
def available() -> str | None:
    """None when the kernels are loaded, else why they are not."""
    try:
        native.library()
    except OSError as error:
        return str(error)
    return None


@functools.cache
def levels() -> tuple[str, ...]:
    """Names of the SIMD levels that run on this machine, slowest first; the last is the default."""
    name_of = native.library()["gw_level_name"]
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [c_int64]
    names: Iterator[bytes] = itertools.takewhile(bool, map(name_of, itertools.count()))
    return tuple(name.decode() for name in names)
