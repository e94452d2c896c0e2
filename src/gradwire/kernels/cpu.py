"""The C++ kernels of csrc/, through ctypes, which releases the GIL. The same bytes at every SIMD level.

Each function has the name, the results and the arguments (by position) of the function in `gradwire.kernels.reference`. A
function raises RuntimeError for unsuitable tensors, and ctypes.ArgumentError for arguments that are no CPU tensors. All functions
run on one thread, except `local_update`, which uses torch's threads. The library depends on neither Python nor torch, so one
build serves all versions.
"""

import ctypes
import functools
import inspect
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import byref, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch

from gradwire.core import native
from gradwire.kernels import reference
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.scattered import Scattered
from gradwire.kernels.segments import Segments

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.uint8: 4}


class Tensor(ctypes.Structure):
    """An argument that is a tensor on the CPU. Twin of `Tensor` in csrc/api.hpp."""

    _fields_ = (
        *(("data", c_void_p), ("numel", c_int64), ("dtype", c_int32), ("contiguous", c_int32)),
        *(("places", c_void_p), ("factor", c_double)),
    )

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a kernel takes a tensor here, not {tensor!r}")
        if not tensor.is_cpu:
            raise TypeError(f"the C++ kernels take tensors on the CPU, not on {tensor.device}")
        dtype = DTYPES.get(tensor.dtype, -1)
        return byref(cls(tensor.data_ptr(), tensor.numel(), dtype, tensor.is_contiguous()))

    @classmethod
    def apart(cls, elements: Scattered, places: Any) -> "Tensor":
        """An argument whose rows lie in several tensors."""
        return cls(None, elements.count, DTYPES[elements.dtype], False, ctypes.addressof(places), elements.factor)


class Update(ctypes.Structure):
    """An argument that is a LocalUpdate. Twin of `Update` in csrc/api_weights.cpp."""

    _fields_ = (*((name, c_float) for name in LocalUpdate._fields), ("threads", c_int64))

    @classmethod
    def from_param(cls, by: LocalUpdate) -> Any:
        return byref(cls(*by, torch.get_num_threads()))


def _argument(convert: Callable[[Any], Any]) -> type:
    """The type of an argument that ctypes passes to C as `convert` returns it."""
    return type("Argument", (), {"from_param": staticmethod(convert)})


def _one_of(numbers: Mapping[Any, int]) -> type:
    """The type of an argument that C takes as a number."""
    return _argument(lambda word: c_int64(numbers[word]))


_WORDS = {
    "scale": _one_of({"max": 0, "minmax": 1, "l2": 2}),
    "rounding": _one_of({"stochastic": 0, "nearest": 1}),
    "format": _one_of({"e4m3": 0, "e5m2": 1}),
    "levels": _one_of({"uniform": 0, "lloyd": 1}),
}
_TYPES = {
    torch.Tensor: Tensor,
    torch.Tensor | None: _argument(lambda tensor: None if tensor is None else Tensor.from_param(tensor)),
    Segments: _argument(lambda segments: Tensor.from_param(segments.table)),
    torch.dtype: _one_of(DTYPES),
    LocalUpdate: Update,
    int: c_int64,
    float: c_double,
    bool: c_bool,
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    kernel: tuple(
        _WORDS.get(name) or _TYPES[parameter.annotation]
        for name, parameter in inspect.signature(getattr(reference, kernel)).parameters.items()
    )
    for kernel in reference.__all__
}
"""The types of each kernel's arguments, from the signature of the reference."""


ROWS = {
    "copy_into": (Tensor, Tensor),
    "add_into": (Tensor, Tensor),
    "gather_rows": (Tensor, _TYPES[Segments], c_bool, Tensor),
    "scatter_rows": (Tensor, _TYPES[Segments], c_bool, Tensor),
    "scale_rows": (Tensor, _TYPES[Segments]),
}
"""Functions of csrc/api_exchange.cpp that only `call` makes calls of: (into, source), (from, segments, [add, into])."""


class Call(NamedTuple):
    """A call of a kernel that C++ runs later, any number of times, on the same memory."""

    function: int
    """The address of the function in its packed form."""
    words: tuple[int, ...]
    """The arguments, 64 bits each."""
    keeps: tuple[Any, ...]
    """The memory that the words point to."""


def call(name: str, *arguments: Any) -> Call:
    """A call of a kernel, or of a function in `ROWS`. Tensors must keep their memory as long as the call is used; a `Scattered`
    may stand for the tensor that segments are of."""
    kinds = ARGUMENTS.get(name) or ROWS[name]
    words, keeps = [], list(arguments)
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(argument, Scattered):
            places = argument.addresses.of_rows(next(each for each in arguments if isinstance(each, Segments)))
            keeps += [places, apart := Tensor.apart(argument, places)]
            words.append(ctypes.addressof(apart))
        elif kind is c_double:
            words.append(struct.unpack("<q", struct.pack("<d", argument))[0])
        elif kind in (c_int64, c_bool):
            words.append(int(argument))
        elif (converted := kind.from_param(argument)) is None:
            words.append(0)
        elif isinstance(converted, c_int64):
            words.append(converted.value)
        else:
            keeps.append(converted._obj)
            words.append(ctypes.addressof(converted._obj))
    function = ctypes.cast(native.library()[f"gw_packed_{name}"], c_void_p).value
    assert function is not None
    return Call(function, tuple(words), tuple(keeps))


def run(calls: Iterable[Call]) -> None:
    """Run calls from Python. Raises RuntimeError where one refuses its arguments."""
    for function, words, _ in calls:
        packed = (c_int64 * len(words))(*words)
        _refused(_PACKED(function)(packed))


_PACKED = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(c_int64))


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
