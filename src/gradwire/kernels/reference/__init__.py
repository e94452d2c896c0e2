"""The meaning of the kernels, in plain torch: what csrc/ and later kernels must reproduce byte for byte.

Works on any device and is correct everywhere; hundreds of times slower than the C++ kernels.
"""

from gradwire.kernels.reference.cast import cast_decode, cast_encode
from gradwire.kernels.reference.qsgd import qsgd_decode, qsgd_encode
from gradwire.kernels.reference.signs import mean_sign_encode, sign_decode, sign_encode
from gradwire.kernels.reference.ternary import terngrad_encode, threshold_decode, threshold_encode

__all__ = [
    "cast_decode",
    "cast_encode",
    "mean_sign_encode",
    "qsgd_decode",
    "qsgd_encode",
    "sign_decode",
    "sign_encode",
    "terngrad_encode",
    "threshold_decode",
    "threshold_encode",
]
