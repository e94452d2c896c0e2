"""Kernels for CUDA in Triton, with the bytes of the reference; what has no kernel here yet is the reference itself.

Imported by `kernels_for("cuda")` only: Triton is loaded with it.
"""

from gradwire.kernels import reference
from gradwire.kernels.reference import *  # noqa: F403
from gradwire.kernels.triton.block_topk import block_topk_decode, block_topk_encode
from gradwire.kernels.triton.cast import cast_decode, cast_encode
from gradwire.kernels.triton.qsgd import qsgd_decode, qsgd_encode, terngrad_encode
from gradwire.kernels.triton.randomk import gather_random, randomk_decode, randomk_encode, scatter_random
from gradwire.kernels.triton.scaled import (
    exponential_decode,
    exponential_encode,
    fp8_decode,
    fp8_encode,
    natural_decode,
    natural_encode,
)
from gradwire.kernels.triton.signs import mean_sign_encode, sign_decode, sign_encode
from gradwire.kernels.triton.sparse import dgc_encode, topk_decode, topk_encode
from gradwire.kernels.triton.ternary import threshold_decode, threshold_encode

__all__ = [
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
    "mean_sign_encode",
    "natural_decode",
    "natural_encode",
    "qsgd_decode",
    "qsgd_encode",
    "randomk_decode",
    "randomk_encode",
    "scatter_random",
    "sign_decode",
    "sign_encode",
    "terngrad_encode",
    "threshold_decode",
    "threshold_encode",
    "topk_decode",
    "topk_encode",
]
__all__ += [name for name in reference.__all__ if name not in __all__]
