"""The checksum of a payload, which finds every flip of a bit: CRC32C."""

import ctypes
import functools
from collections.abc import Callable

import torch

from gradwire.core import native
from gradwire.kernels.cpu import available
from gradwire.kernels.reference.checksum import crc32c as reference_crc32c


def crc32c(values: torch.Tensor) -> int:
    """The CRC32C of the bytes of a contiguous CPU tensor, below 2**32. The same on ranks without the C++ library."""
    if available() is not None:
        return reference_crc32c(values)
    return _native()(values.data_ptr(), values.nbytes, False)


@functools.cache
def _native() -> Callable[[int, int, bool], int]:
    """gw_crc32c(bytes, their number, whether without the processor's instruction)."""
    function = native.library()["gw_crc32c"]
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool), ctypes.c_uint32
    checksum: Callable[[int, int, bool], int] = function
    return checksum
