"""Specs that send factors of matrices."""

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gradwire.core.checks import number, whole
from gradwire.core.specs.base import ElementRun, Law, Spec, check_seed, register_spec
from gradwire.errors import SpecError

_NEVER = 1e300
"""A compression that no matrix reaches."""


@register_spec
class PowerSGD(Spec, frozen=True):
    """Each tensor as a matrix of its outermost dimension in memory against the rest, sent as two factors of rank r, with its
    residual (Vogels et al. 2019). Factors are summed on the wire, in two rounds; the second factor of a step begins the next one.

    Vectors and small matrices, which would shrink too little, are summed uncompressed in the first round.
    """

    id: ClassVar[str] = "powersgd"
    always_written: ClassVar[tuple[str, ...]] = ("rank",)
    schemes: ClassVar[tuple[str, ...]] = ("allreduce",)
    rounds: ClassVar[int] = 2
    state: ClassVar[tuple[str, ...]] = ("residual",)
    law: ClassVar[Law] = Law("contractive")
    granularity: ClassVar[int] = 0
    compressor: ClassVar[str] = "gradwire.compressors.powersgd:PowerSGDCompressor"

    rank: int = 4
    """Columns of the factors. Larger: less error, more bytes."""
    min_compression: float = 2.0
    """A matrix is sent uncompressed unless its factors are this many times smaller."""
    warm_start: bool = True
    """Begin with the last step's factor. False: a random factor in every step, more error."""
    seed: int = 0
    """Seed of the first factors."""
    start_step: int = 10
    """Earlier steps are uncompressed: gradients change fast there, and factors that begin as noise follow too slowly."""

    def __post_init__(self) -> None:
        whole("rank", self.rank, "the columns of a factor", low=1, high=1024, error=SpecError)
        whole("start_step", self.start_step, "the first step with factors", error=SpecError)
        number("min_compression", self.min_compression, "how many times smaller", positive=True, error=SpecError)
        if not isinstance(self.warm_start, bool):
            raise SpecError(f"warm_start is {self.warm_start!r}: it must be True or False.")
        check_seed(self.seed)

    def at_step(self, step: int) -> "PowerSGD":
        """
        >>> PowerSGD().at_step(9).factors((256, 256)), PowerSGD().at_step(10).factors((256, 256))
        (None, (256, 256))
        """
        never = step < self.start_step
        return msgspec.structs.replace(self, start_step=0, min_compression=_NEVER if never else self.min_compression)

    def factors(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """(rows, columns) of the matrix, or None where the tensor is sent whole.

        >>> PowerSGD(rank=4).factors((256, 64, 3, 3)), PowerSGD().factors((256,))
        ((256, 576), None)
        """
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        small = (rows + columns) * self.rank * self.min_compression
        fits = self.rank <= min(rows, columns) and small <= rows * columns
        return (rows, columns) if fits else None

    def round_numels(self, runs: Sequence[ElementRun]) -> tuple[int, int]:
        """Number of float32 values that are summed in each round."""
        first = second = 0
        for run in runs:
            matrix = self.factors(run.shape)
            first += matrix[0] * self.rank if matrix else run.numel
            second += matrix[1] * self.rank if matrix else 0
        return first, second

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return 4 * sum(self.round_numels(runs))
