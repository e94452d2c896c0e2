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
FLOATS = torch.float32, torch.bfloat16, torch.float16


def in_memory(*tensors: torch.Tensor) -> list[torch.Tensor] | None:
    """The elements of tensors in the order in which they lie in memory; None unless all have one dense layout, and one dtype that
    the kernels take as numbers."""
    first = tensors[0]
    dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    if not dense or first.dtype not in FLOATS:
        return None
    if any(each.dtype is not first.dtype or each.stride() != first.stride() for each in tensors):
        return None
    return [each.as_strided((each.numel(),), (1,)) for each in tensors]


class Tensor(ctypes.Structure):
    """An argument that is a tensor on the CPU. Twin of `Tensor` in csrc/api.hpp."""

    _fields_ = (
        *(("data", c_void_p), ("numel", c_int64), ("dtype", c_int32), ("contiguous", c_int32)),
        *(("places", c_void_p), ("factor", c_double)),
    )

    @classmethod
    def packed(cls, tensor: Any) -> "Tensor":
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a kernel takes a tensor here, not {tensor!r}")
        if not tensor.is_cpu:
            raise TypeError(f"the C++ kernels take tensors on the CPU, not on {tensor.device}")
        return cls(tensor.data_ptr(), tensor.numel(), DTYPES.get(tensor.dtype, -1), tensor.is_contiguous())

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        return byref(cls.packed(tensor))

    @classmethod
    def apart(cls, elements: Scattered, places: Any) -> "Tensor":
        """An argument whose rows lie in several tensors."""
        return cls(None, elements.count, DTYPES[elements.dtype], False, ctypes.addressof(places), elements.factor)


class Update(ctypes.Structure):
    """An argument that is a LocalUpdate. Twin of `Update` in csrc/api_weights.cpp."""

    _fields_ = (*((name, c_float) for name in LocalUpdate._fields), ("threads", c_int64))

    @classmethod
    def packed(cls, by: LocalUpdate) -> "Update":
        return cls(*by, torch.get_num_threads())

    @classmethod
    def from_param(cls, by: LocalUpdate) -> Any:
        return byref(cls.packed(by))


def _argument(packed: Callable[[Any], ctypes.Structure | int | None]) -> type:
    """The type of an argument of which `packed` makes what C takes: the place of a structure, a number, or no place."""

    def from_param(argument: Any) -> Any:
        made = packed(argument)
        return c_int64(made) if isinstance(made, int) else None if made is None else byref(made)

    return type("Argument", (), {"packed": staticmethod(packed), "from_param": staticmethod(from_param)})


def _one_of(numbers: Mapping[Any, int]) -> type:
    """The type of an argument that C takes as a number."""
    return _argument(numbers.__getitem__)


def _table_of(segments: Segments) -> Tensor:
    """The rows of segments. Made once: many calls may be of the same ones."""
    if (made := segments.launches.get(_table_of)) is None:
        if segments.device.type != "cpu":
            raise TypeError(f"the C++ kernels take segments on the CPU, not on {segments.device}")
        rows = (c_int64 * (5 * len(segments.rows)))(*itertools.chain.from_iterable(segments.rows))
        made = segments.launches[_table_of] = Tensor(ctypes.addressof(rows), len(rows), DTYPES[torch.int64], True)
        made.rows = rows  # kept as long as it
    return made


_WORDS = {
    "scale": _one_of({"max": 0, "minmax": 1, "l2": 2}),
    "rounding": _one_of({"stochastic": 0, "nearest": 1}),
    "format": _one_of({"e4m3": 0, "e5m2": 1}),
    "levels": _one_of({"uniform": 0, "lloyd": 1}),
}
_TYPES = {
    torch.Tensor: Tensor,
    torch.Tensor | None: _argument(lambda tensor: None if tensor is None else Tensor.packed(tensor)),
    Segments: _argument(_table_of),
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
    function, packs, at = _packed(name)
    words, keeps = [], list(arguments)
    for pack, argument in zip(packs, arguments, strict=True):
        if type(argument) is Scattered:
            places = argument.addresses.of_rows(arguments[at])
            keeps.append(places)
            word: Any = Tensor.apart(argument, places)
        else:
            word = pack(argument)
        if type(word) is not int:  # the place of a structure
            keeps.append(word)
            word = 0 if word is None else ctypes.addressof(word)
        words.append(word)
    return Call(function, tuple(words), tuple(keeps))


def _word_of(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


@functools.cache
def _packed(name: str) -> tuple[int, tuple[Callable[[Any], Any], ...], int]:
    """The address of a function in its packed form; what makes a word of each argument, or the structure that the word points to;
    and the place of the segments."""
    function = ctypes.cast(native.library()[f"gw_packed_{name}"], c_void_p).value
    assert function is not None
    kinds: tuple[Any, ...] = ARGUMENTS.get(name) or ROWS[name]
    packs: dict[Any, Callable[[Any], Any]] = {c_int64: int, c_bool: int, c_double: _word_of}
    places = [at for at, kind in enumerate(kinds) if kind is _TYPES[Segments]]
    return function, tuple(packs.get(kind) or kind.packed for kind in kinds), (places or [0])[0]


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
