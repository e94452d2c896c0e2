"""Top-k: the elements of largest magnitude, of each tensor or of all that is encoded at once (Aji and Heafield 2017).

Law: contractive, of a group at least the part `ratio` of its squared norm is kept. Both selections give the same elements
here: a bound found on a sample is used where enough elements reach it, and these hold the largest; else all are searched.
NaN and Inf count as the largest, so they travel; with error feedback the residual there stays what it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context, residual_in
from gradwire.core.specs import Spec, TopK
from gradwire.errors import PayloadError
from gradwire.kernels import Segments, kernels_for
from gradwire.kernels.reference.indices import DAMAGED


class TopKCompressor(Compressor):
    """Values in the gradient's own dtype, then their indices in ascending order."""

    def __init__(self, spec: TopK) -> None:
        super().__init__(spec)
        self.ratio, self.together, self.threshold = spec.ratio, spec.per == "bucket", 0.0

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        kernels_for(src.device.type).topk_encode(
            src, residual_in(state), segments, self.ratio, self.together, self.threshold, payload
        )

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        with indices_checked(self.spec):
            kernels_for(dst.device.type).topk_decode(payload, segments, dtype, self.ratio, self.together, add, dst)


@contextmanager
def indices_checked(spec: Spec) -> Iterator[None]:
    """Names the spec where a kernel finds indices that no encode writes."""
    try:
        yield
    except RuntimeError as error:
        if DAMAGED not in str(error):
            raise
        raise PayloadError(
            f"{DAMAGED}: they are not those of a payload of {spec!r}, and nothing was decoded. Ranks run different plans or "
            "versions, or the bytes were changed."
        ) from error
