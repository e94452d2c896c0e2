"""Kernels for CUDA in Triton. Each is the function of the same name in `gradwire.kernels.reference` and gives its bytes. A call
queues its work on the device and waits for nothing.

Most calls launch one Triton kernel, which also updates the state. Three calls launch several kernels: mean_sign of whole runs
(sums of pieces, means, signs), topk and dgc (count, choose, send, pack or find indices), and reconstruct (is Q finite, the
product).

Between these kernels, torch executes operations of static sizes: cumsum and index_add over one number for each program, copies
of a sparse payload's values, which may begin at any byte, and zeroed or cloned scratch. No such operation is as large as a
gradient.

Three results differ from the reference. Damaged indices give NaN in their group or block instead of an error, because an error
would make the host wait. DGC's clipping sums squares in float64 in another order. PowerSGD sums in another order.

Only `kernels_for("cuda")` imports this package, because the package loads Triton.
"""
# ruff: noqa: F401 - the imports are the kernels of `__all__`, which a test compares with the reference

from gradwire.kernels import reference
from gradwire.kernels.triton.block_topk import block_topk_decode, block_topk_encode
from gradwire.kernels.triton.cast import cast_decode, cast_encode
from gradwire.kernels.triton.coded import (
    exponential_decode,
    exponential_encode,
    fitted_decode,
    fitted_encode,
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
from gradwire.kernels.triton.decode_sum import decode_sum
from gradwire.kernels.triton.local_update import local_update
from gradwire.kernels.triton.low_rank import back_project, orthogonalise, project, reconstruct
from gradwire.kernels.triton.randomk import gather_random, randomk_decode, randomk_encode, scatter_random
from gradwire.kernels.triton.signs import mean_sign_encode, sign_decode, sign_encode
from gradwire.kernels.triton.sparse import dgc_encode, topk_decode, topk_encode
from gradwire.kernels.triton.weights import learn_energy, weigh_elements

__all__ = reference.__all__

TAKES_BATCHES = True
"""Kernels of specs with `batches` take a `Batch`, and there is a `decode_sum`."""
