"""Specs of quantisers with several bits an element."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

import msgspec

from gradwire.core.checks import number, whole, word
from gradwire.core.payload import coded_bytes, qsgd_bytes
from gradwire.core.specs.base import BlockSpec, ElementRun, Kernels, Law, check_block, check_seed, register_spec
from gradwire.errors import SpecError


@register_spec
class QSGD(BlockSpec, frozen=True):
    """Quantisation to `bits` bits with one scale per block (QSGD; CGX's compressor).

    Raises SpecError for a value outside its range.
    """

    id: ClassVar[str] = "qsgd"
    always_written: ClassVar[tuple[str, ...]] = ("bits", "block")
    varies_in_family: ClassVar[tuple[str, ...]] = ("bits",)

    bits: int = 4
    """2 to 8 bits an element, sign included. Fewer: fewer bytes, more error. At 2 bits there are three values, 1.6 bits."""
    block: int = 128
    """Elements that share one scale: a power of two from 32 to 8192. Larger: fewer scale bytes, more error."""
    scale: str = "max"
    """max: the block's largest magnitude; minmax: 2^bits levels between minimum and maximum, less error, twice the
    scale bytes; l2: the block's norm, much more error at few bits (CGX's formula, for comparison); ls: at most 4 bits, the scale
    with the least squared error. With ErrorFeedback, ls keeps the size of what is sent; max sends too much at 2 bits. It
    refuses l2 where a block of like elements can become zeros: 2 bits, 3 with blocks above 32, 4 with blocks above 128."""
    rounding: str = "auto"
    """stochastic: unbiased, more error; nearest: biased, less error (give it ErrorFeedback). auto: nearest inside ErrorFeedback,
    which removes the bias (but not for minmax below 4 bits); else stochastic. At 2 bits nearest learns as DDP does, and
    stochastic ends with a loss 5 % higher. A scale 'ls' always rounds to nearest."""
    seed: int = 0
    """Seed of the stochastic rounding. Another seed: other noise, the same size of error."""
    levels: str = "uniform"
    """uniform: equal steps from zero to the scale; exponential: each level is half of the next (NUQSGD), with less error if
    most elements of a block are much smaller than the largest; lloyd: 2^bits levels without zero, with the least error for
    normal elements (Lloyd 1982, Max 1960). lloyd needs scale='ls', and at 2 bits sends more bytes than uniform."""
    blocks: str = "tensor"
    """tensor: every tensor of a bucket begins a new block; bucket: a block may hold the end of one tensor and the begin of the
    next (QNCCL). bucket: fewer bytes for many tiny tensors, more error in those that share a block with larger values."""

    def __post_init__(self) -> None:
        whole("bits", self.bits, "the bits of an element", low=2, high=8, error=SpecError)
        check_block(self.block)
        word("scale", self.scale, ("max", "minmax", "l2", "ls"), error=SpecError)
        word("rounding", self.rounding, ("auto", "stochastic", "nearest"), error=SpecError)
        check_seed(self.seed)
        word("blocks", self.blocks, ("tensor", "bucket"), error=SpecError)
        word("levels", self.levels, ("uniform", "exponential", "lloyd"), error=SpecError)
        if self.levels == "exponential" and self.scale == "minmax":
            raise SpecError(
                "levels and scale are 'exponential' and 'minmax': exponential levels lie around zero, minmax levels may not. "
                "Use scale='max'."
            )
        if self.levels == "exponential" and self.scale == "ls":
            raise SpecError(
                "levels and scale are 'exponential' and 'ls': only 'uniform' and 'lloyd' are fitted. Use scale='max'."
            )
        if self.levels == "lloyd" and self.scale != "ls":
            raise SpecError(
                f"levels and scale are 'lloyd' and {self.scale!r}: these levels are multiples of a fitted scale. Use scale='ls'."
            )
        if self.scale == "ls" and self.bits > 4:
            raise SpecError(
                f"scale and bits are 'ls' and {self.bits}: from 5 bits on the largest magnitude is as good. Use scale='max'."
            )
        if self.scale == "ls" and self.rounding == "stochastic":
            raise SpecError(
                "scale and rounding are 'ls' and 'stochastic': values beyond the scale are cut, so no rounding is unbiased. "
                "Leave rounding out, or use scale='max'."
            )

    def kernels(self, part: float = 1.0) -> Kernels:
        """The segments say how many bits an element has, so tensors of 2 to 8 bits share one call. With nearest a value is off by
        at most half a level, so max and l2 scales are contractive (minmax from 4 bits on: zero is not among its levels). With
        l2 the error may be all of a block (`check_fed_back`).
        Exponential levels (NUQSGD, Ramezani-Kebrya et al. 2021) halve from the scale on. A block with a NaN or an Inf decodes to
        NaN throughout, so a loss scaler sees it, and keeps the residual it had (CGX, sections 2.3 and 4; docs/papers/cgx.md)."""
        settings, joined = (self.block, self.scale), self.blocks == "bucket"
        if self.scale == "ls":
            fitted = self.block, self.levels
            return Kernels(("fitted_encode", *fitted), ("fitted_decode", *fitted), joined=joined, weighted=True)
        rounding = "nearest" if self.rounding == "nearest" else "stochastic"
        if self.levels == "exponential":
            return Kernels(
                ("exponential_encode", *settings, rounding), ("exponential_decode", self.block), random=True, joined=joined
            )
        return Kernels(("qsgd_encode", *settings, rounding), ("qsgd_decode", *settings), random=True, joined=joined)

    @property
    def law(self) -> Law:
        if self.rounding != "nearest" and self.scale != "ls":
            return Law("unbiased")
        return Law("none") if self.scale == "minmax" and self.bits < 4 else Law("contractive")

    def under_feedback(self) -> "QSGD":
        if self.scale == "ls":
            return self
        nearest = msgspec.structs.replace(self, rounding="nearest")
        return nearest if self.rounding == "auto" and nearest.law.kind == "contractive" else self

    def check_fed_back(self, field: str) -> None:
        """Refuse scales by the norm whose error may be all of a block, since error feedback would send nothing for ever.

        An element below 1/reach of the scale counts as zero, half of the lowest level. The norm of n like elements is sqrt(n) of
        one. With nearest the error is below the input for every block if sqrt(n) < reach, and with stochastic its mean is: the
        variance of n like elements is the largest of all blocks, and it is at least their squared norm from sqrt(n) = reach on.
        """
        if self.scale != "l2" or self.block < self._reach(self.bits) ** 2:
            return
        reach, least = self._reach(self.bits), next(b for b in range(2, 9) if self.block < self._reach(b) ** 2)
        scales = "'max' or 'ls'" if self.bits <= 4 and self.levels == "uniform" else "'max'"
        fitting = [block for block in (32 << power for power in range(9)) if block < reach**2]
        smaller = f", or blocks of at most {fitting[-1]}" if fitting else ""
        raise SpecError(
            f"{field} is {self!r}: elements below 1/{reach} of a block's norm can count as zero, and {self.block} like elements "
            f"have 1/{self.block**0.5:.4g} of it each, so the error of a block may be all of it, and feedback never sends it. "
            f"Use scale={scales}, at least {least} bits{smaller}."
        )

    def _reach(self, bits: int) -> int:
        """The scale over half of the lowest level above zero."""
        top: int = (1 << (bits - 1)) - 1
        return 2 * top if self.levels == "uniform" else 1 << top

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        return self.scale != "minmax" and self.levels != "lloyd"

    @property
    def touches_segments_only(self) -> bool:  # type: ignore[override]
        return self.blocks == "tensor"

    @property
    def element_bits(self) -> int:
        return self.bits

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        coded = [(run.numel, run.bits) for run in runs]
        if self.blocks == "bucket":
            coded = [(sum(numel for numel, _ in alike), bits) for bits, alike in groupby(coded, itemgetter(1))]
        return sum(qsgd_bytes(coded, self.block, self.scale, self.levels))


@register_spec
class TernGrad(BlockSpec, frozen=True):
    """Three values, minus the scale, zero and the scale, chosen at random so that the mean is right (Wen et al. 2017).
    1.6 bits an element."""

    id: ClassVar[str] = "terngrad"
    code_bits: ClassVar[int] = 2
    ternary: ClassVar[bool] = True
    element_bits: ClassVar[int] = 2

    block: int = 1024
    """Elements that share one scale, their largest magnitude: a power of two from 32 to 8192. The paper's is a layer."""
    clip: float = 0.0
    """The largest magnitude, in standard deviations of the block (its root mean square); the paper uses 2.5. Smaller: less
    noise, but biased. 0: no clipping."""
    seed: int = 0
    """Seed of the rounding."""

    def __post_init__(self) -> None:
        check_block(self.block)
        number("clip", self.clip, "standard deviations, 0 for no clipping", error=SpecError)
        if 0 < self.clip < 1:
            raise SpecError(f"clip is {self.clip}: below one standard deviation most of the gradient is cut. Use 2.5.")
        check_seed(self.seed)

    @property
    def law(self) -> Law:
        return Law("none") if self.clip else Law("unbiased")

    def kernels(self, part: float = 1.0) -> Kernels:
        """Unclipped TernGrad is QSGD with 2 bits. A block with a NaN or an Inf decodes to NaN, and keeps its residual."""
        unclipped = "qsgd_encode", self.block, "max", "stochastic"
        encode = ("terngrad_encode", self.block, self.clip) if self.clip else unclipped
        return Kernels(encode, ("qsgd_decode", self.block, "max"), random=True)


@register_spec
class Int8(BlockSpec, frozen=True):
    """255 levels between minus and plus the block's largest magnitude, rounded to nearest: 1 byte an element."""

    id: ClassVar[str] = "int8"
    law: ClassVar[Law] = Law("contractive", 0.88)
    element_bits: ClassVar[int] = 8

    block: int = 128
    """Elements that share one scale: a power of two from 32 to 8192."""

    def __post_init__(self) -> None:
        check_block(self.block)

    def kernels(self, part: float = 1.0) -> Kernels:
        """QSGD with 8 bits, rounded to nearest."""
        settings = self.block, "max"
        return Kernels(("qsgd_encode", *settings, "nearest"), ("qsgd_decode", *settings), random=True)


@register_spec
class TwoBit(BlockSpec, frozen=True):
    """2-bit threshold quantisation with a residual (MXNet, CD-SGD). Elements of gradient plus residual from t on are sent as t,
    elements up to -t as -t, and all others as zero. The residual keeps the rest."""

    id: ClassVar[str] = "twobit"
    state: ClassVar[tuple[str, ...]] = ("residual",)
    law: ClassVar[Law] = Law("contractive")

    threshold: float = 0.0
    """t, for a rank's own gradient as the script sees it. MXNet's 0.5 is for gradients summed over a batch: divide by the batch
    size. 0: each block sends its own t."""
    multiple: float = 1.0
    """t of a block over the mean magnitude of its gradient plus residual. Larger: fewer elements are sent; for normal elements 1
    is nearly best. No effect if `threshold` is given."""
    block: int = 1024
    """Elements that share one t: a power of two from 32 to 8192."""

    def __post_init__(self) -> None:
        number("threshold", self.threshold, "what a sent element stands for, 0 for adaptive", error=SpecError)
        number("multiple", self.multiple, "thresholds in mean magnitudes", positive=True, error=SpecError)
        check_block(self.block)

    @property
    def follows_scale(self) -> bool:  # type: ignore[override]
        return not self.threshold

    def kernels(self, part: float = 1.0) -> Kernels:
        """A sent value is at most as large as the element, so the error is never larger than the input. NaN and Inf decode to
        NaN and keep their residual; if blocks have their own t, so does the whole block (docs/papers/cd-sgd.md)."""
        settings = self.block, self.threshold * part
        return Kernels(("threshold_encode", *settings, self.multiple), ("threshold_decode", *settings))

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        sections = coded_bytes([(run.numel, 2) for run in runs], self.block)
        return sections.codes + (0 if self.threshold else sections.scales)
