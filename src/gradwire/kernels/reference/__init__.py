"""The meaning of the kernels, in plain torch: what csrc/ and later kernels must reproduce byte for byte.

Works on any device and is correct everywhere; hundreds of times slower than the C++ kernels.
"""

from gradwire.kernels.reference.cast import cast_decode, cast_encode
from gradwire.kernels.reference.fp8 import fp8_decode, fp8_encode
from gradwire.kernels.reference.powers import (
    exponential_decode,
    exponential_encode,
    natural_decode,
    natural_encode,
)
from gradwire.kernels.reference.qsgd import qsgd_decode, qsgd_encode

__all__ = [
    "cast_decode",
    "cast_encode",
    "exponential_decode",
    "exponential_encode",
    "fp8_decode",
    "fp8_encode",
    "natural_decode",
    "natural_encode",
    "qsgd_decode",
    "qsgd_encode",
]
