"""Specs that send one bit an element."""

from collections.abc import Sequence
from typing import ClassVar

from gradwire.core.specs.base import BlockSpec, ElementRun, Kernels, Law, Spec, check_block, check_momentum, register_spec


@register_spec
class SignSGD(Spec, frozen=True):
    """Signs with a majority vote of the ranks: each element of the gradient becomes -1 or 1 (Bernstein et al. 2018; a tie and
    zero count as 1). Choose the learning rate for steps of size 1. NaN and Inf count by their sign bits, and become finite."""

    id: ClassVar[str] = "signsgd"
    touches_segments_only: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    follows_scale: ClassVar[bool] = False
    votes: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("alltoall",)
    compressor: ClassVar[str] = "gradwire.compressors.signs:SignSGDCompressor"

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return sum((run.numel + 7) // 8 for run in runs)


@register_spec
class Signum(SignSGD, frozen=True):
    """SignSGD on each rank's own running mean of gradients (Bernstein et al. 2018). A NaN or an Inf changes no mean, so it
    becomes finite."""

    id: ClassVar[str] = "signum"
    state: ClassVar[tuple[str, ...]] = ("momentum",)
    compressor: ClassVar[str] = "gradwire.compressors.signs:SignumCompressor"

    momentum: float = 0.9
    """m = momentum * m + (1 - momentum) * gradient."""

    def __post_init__(self) -> None:
        check_momentum(self.momentum)


class _MeanSigns(BlockSpec, frozen=True):
    """Signs with the means of blocks. Block 0: all elements of a tensor that are encoded at once are one block."""

    code_bits: ClassVar[int] = 1
    keeps_zeros: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]] = ("residual",)
    law: ClassVar[Law] = Law("contractive")

    def __post_init__(self) -> None:
        if self.block != 0:
            check_block(self.block, "the elements of a block, 0 for the tensor")

    def kernels(self, part: float = 1.0) -> Kernels:
        """Every element becomes a mean of elements, so the error is never larger than the input, even with the mean in
        bfloat16. A block with a NaN or an Inf decodes to NaN throughout, and keeps the residual it had."""
        settings = self.block, self.scales
        return Kernels(("mean_sign_encode", *settings), ("sign_decode", *settings))


@register_spec
class EFSignSGD(_MeanSigns, frozen=True):
    """The sign of gradient plus residual, times the block's mean magnitude. The residual keeps the error
    (Karimireddy et al. 2019)."""

    id: ClassVar[str] = "ef_signsgd"

    block: int = 1024
    """Elements that share one magnitude: a power of two from 32 to 8192, or 0 for all elements of a tensor that are encoded at
    once. Larger: fewer bytes, more error."""


@register_spec
class OneBit(_MeanSigns, frozen=True):
    """One bit an element of gradient plus residual: the mean of the block's elements from zero on, or the mean of those below
    zero. The residual keeps the error (Seide et al. 2014)."""

    id: ClassVar[str] = "onebit"
    scales: ClassVar[int] = 2

    block: int = 1024
    """Elements that share the two means: a power of two from 32 to 8192, or 0 for all elements of a tensor that are encoded at
    once. Smaller: less error, more bytes. Blocks of up to 8192 read gradient and residual once, a whole tensor twice."""
