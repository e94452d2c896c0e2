"""The meaning of the kernels, in plain torch: what csrc/ and later kernels must reproduce byte for byte.

Works on any device and is correct everywhere; hundreds of times slower than the C++ kernels.
"""

from gradwire.kernels.reference.cast import cast_decode, cast_encode
from gradwire.kernels.reference.low_rank import back_project, orthogonalise, project, reconstruct
from gradwire.kernels.reference.qsgd import qsgd_decode, qsgd_encode

__all__ = [
    "back_project",
    "cast_decode",
    "cast_encode",
    "orthogonalise",
    "project",
    "qsgd_decode",
    "qsgd_encode",
    "reconstruct",
]
