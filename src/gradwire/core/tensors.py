"""The name, shape, dtype and device of a trainable tensor, and the fingerprint of a model."""

import hashlib
import json
import math
from collections.abc import Sequence

import msgspec

from gradwire.core.checks import DTYPE_BYTES, freeze, text, under, whole, word
from gradwire.errors import PlanError


class Shaped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of every tensor, in plans and in profiles."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """float32, float64, float16 or bfloat16: torch's word without `torch.`"""

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient, uncompressed."""
        return self.numel * DTYPE_BYTES[self.dtype]


class TensorInfo(Shaped, frozen=True):
    """One trainable tensor. Raises PlanError for a dtype or device that gradwire does not synchronise.

    >>> TensorInfo("fc.weight", (10, 4), "float32").nbytes
    160
    """

    device: str = "cpu"
    """cpu or gpu"""
    embedding: bool = False
    """Whether its rows are looked up, so that rows which no batch uses have a gradient of zero."""

    def __post_init__(self) -> None:
        text("name", self.name, "a parameter's name", error=PlanError)
        with under(f"tensor {self.name!r}:"):
            freeze(self, "shape")
            for index, extent in enumerate(self.shape):
                whole(f"shape[{index}]", extent, "an extent", error=PlanError)
            word("dtype", self.dtype, tuple(DTYPE_BYTES), error=PlanError)
            word("device", self.device, ("cpu", "gpu"), error=PlanError)


def fingerprint(tensors: Sequence[TensorInfo]) -> str:
    """64 hex digits that tell whether a plan was made for these tensors, by name, shape and dtype.

    Order and device do not count: another torch may give another gradient-ready order, and the plan still fits. The hash is
    SHA-256 of one line for each tensor, sorted by name: the compact JSON array of name, shape and dtype, non-ASCII characters
    escaped, then a line feed; for example `["fc.bias",[1000],"float32"]` and 0x0A.

    >>> fingerprint([TensorInfo("fc.bias", (1000,), "float32")])[:12]
    '31e07f14637c'
    """
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        line = json.dumps([tensor.name, list(tensor.shape), tensor.dtype], separators=(",", ":"))
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()
