"""The kernels in plain torch. They define the bytes that csrc/ and the Triton kernels must give.

They run on any device, hundreds of times slower than the C++ kernels.
"""
# ruff: noqa: F401 - the imports are the kernels

from gradwire.kernels.reference.cast import cast_decode, cast_encode
from gradwire.kernels.reference.fitted import fitted_decode, fitted_encode
from gradwire.kernels.reference.fp8 import fp8_decode, fp8_encode
from gradwire.kernels.reference.local_update import local_update as local_update
from gradwire.kernels.reference.low_rank import back_project, orthogonalise, project, reconstruct
from gradwire.kernels.reference.powers import exponential_decode, exponential_encode, natural_decode, natural_encode
from gradwire.kernels.reference.qsgd import qsgd_decode, qsgd_encode
from gradwire.kernels.reference.randomk import gather_random, randomk_decode, randomk_encode, scatter_random
from gradwire.kernels.reference.signs import mean_sign_encode, sign_decode, sign_encode
from gradwire.kernels.reference.sparse import block_topk_decode, block_topk_encode, dgc_encode, topk_decode, topk_encode
from gradwire.kernels.reference.ternary import terngrad_encode, threshold_decode, threshold_encode
from gradwire.kernels.reference.weights import learn_energy, weigh_elements

__all__ = [name for name, kernel in sorted(globals().items()) if callable(kernel)]
