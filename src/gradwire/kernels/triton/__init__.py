"""Kernels for CUDA in Triton, with the bytes of the reference. A call queues its work and waits for nothing.

One Triton kernel a call, which also updates the state: cast, qsgd, terngrad, fp8, natural, exponential, threshold, sign,
mean_sign in blocks, block_topk, randomk, gather_random, scatter_random, project, back_project, orthogonalise, local_update.

Several a call: mean_sign of whole runs (sums of pieces, means, signs), topk and dgc (count, choose, send, pack or find indices),
reconstruct (is Q finite, the product).

Operations of torch between them, all of static sizes: cumsum and index_add over one number a program, for the order of what topk
and dgc send; copies of a sparse payload's values, which may begin at any byte; zeroed and cloned scratch. Nothing of the size of
a gradient is in any of them.

Two results differ from the reference, which makes the host wait or adds one by one. Damaged indices give NaN in their group or
block instead of an error. DGC's clipping sums squares in another order, in float64. PowerSGD's sums have another order on each
kind of device.

Imported by `kernels_for("cuda")` only: Triton is loaded with it.
"""

from gradwire.kernels.triton.block_topk import block_topk_decode, block_topk_encode
from gradwire.kernels.triton.cast import cast_decode, cast_encode
from gradwire.kernels.triton.coded import (
    exponential_decode,
    exponential_encode,
    fp8_decode,
    fp8_encode,
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    terngrad_encode,
    threshold_decode,
    threshold_encode,
)
from gradwire.kernels.triton.local_update import local_update
from gradwire.kernels.triton.low_rank import back_project, orthogonalise, project, reconstruct
from gradwire.kernels.triton.randomk import gather_random, randomk_decode, randomk_encode, scatter_random
from gradwire.kernels.triton.signs import mean_sign_encode, sign_decode, sign_encode
from gradwire.kernels.triton.sparse import dgc_encode, topk_decode, topk_encode

__all__ = [
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
]
