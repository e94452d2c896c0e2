"""Specs without selection or levels: plain bytes, narrower floats, and fake compression."""

from collections.abc import Sequence
from typing import ClassVar

from gradwire.core.checks import number, show, word
from gradwire.core.specs.base import BlockSpec, ElementRun, Kernels, Law, Spec, check_block, check_seed, register_spec
from gradwire.errors import SpecError


@register_spec
class Identity(Spec, frozen=True):
    """No compression: the payload is the gradient's own bytes. Exact, 4 bytes an element for float32."""

    id: ClassVar[str] = "identity"
    schemes: ClassVar[tuple[str, ...]] = ("allreduce", "alltoall", "allgather")
    encodes: ClassVar[bool] = False
    touches_segments_only: ClassVar[bool] = True
    law: ClassVar[Law] = Law("exact")
    compressor: ClassVar[str] = "gradwire.compressors.identity:IdentityCompressor"

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return sum(run.numel for run in runs) * itemsize


@register_spec
class Cast(Spec, frozen=True):
    """A narrower float on the wire, rounded to nearest even: 2 bytes an element."""

    id: ClassVar[str] = "cast"
    always_written: ClassVar[tuple[str, ...]] = ("dtype",)
    law: ClassVar[Law] = Law("contractive")
    compressor: ClassVar[str] = "gradwire.compressors.cast:CastCompressor"

    dtype: str = "float16"
    """float16: less error, overflows beyond 65504; bfloat16: 8 times the error, float32's whole range."""

    def __post_init__(self) -> None:
        word("dtype", self.dtype, ("float16", "bfloat16"), error=SpecError)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return 2 * sum(run.numel for run in runs)


@register_spec
class FP8(BlockSpec, frozen=True):
    """An 8-bit float on the wire with one scale per block, rounded to nearest even: about 1 byte an element.

    The scale brings the block's largest magnitude to the format's largest number.
    """

    id: ClassVar[str] = "fp8"
    always_written: ClassVar[tuple[str, ...]] = ("format",)
    law: ClassVar[Law] = Law("contractive", 0.9)

    format: str = "e4m3"
    """e4m3: relative error at most 1/16 over a range of 2^17; e5m2: 1/8 over 2^32."""
    block: int = 128
    """Elements that share one scale: a power of two from 32 to 8192."""

    def __post_init__(self) -> None:
        word("format", self.format, ("e4m3", "e5m2"), error=SpecError)
        check_block(self.block)

    def kernels(self, part: float = 1.0) -> Kernels:
        """Numbers that are normal in the format are off by at most 1/16 (e4m3) or 1/8 (e5m2) of themselves, the others by half
        of its smallest number. A block with a NaN or an Inf decodes to NaN throughout, and keeps the residual it had."""
        return Kernels(("fp8_encode", self.block, self.format), ("fp8_decode", self.block, self.format))


@register_spec
class Natural(BlockSpec, frozen=True):
    """Natural compression: sign and a power of two, one of two neighbours, at random with the right mean (Horvath et
    al. 2019). 1 byte an element: 127 powers of two, down from the block's largest. Smaller ones become the last or zero."""

    id: ClassVar[str] = "natural"
    law: ClassVar[Law] = Law("unbiased")

    block: int = 1024
    """Elements that share one scale: a power of two from 32 to 8192."""
    seed: int = 0
    """Seed of the rounding."""

    def __post_init__(self) -> None:
        check_block(self.block)
        check_seed(self.seed)

    def kernels(self, part: float = 1.0) -> Kernels:
        """The variance of an element is at most an eighth of its square, as far as the block's powers reach. A block with a
        NaN or an Inf decodes to NaN throughout, and keeps the residual it had."""
        return Kernels(("natural_encode", self.block), ("natural_decode", self.block), random=True)


@register_spec
class Truncate(Spec, frozen=True):
    """Fake compression for measurements: the first 1/ratio of the elements is sent, and the rest arrives as zeros (CGX, Fig.
    1). Training does not work with Truncate: confirm with `unsafe=True`. A NaN or an Inf in the rest arrives as zero, too."""

    id: ClassVar[str] = "truncate"
    touches_segments_only: ClassVar[bool] = True
    example: ClassVar[tuple[float]] = (4.0,)
    law: ClassVar[Law] = Law("contractive")
    compressor: ClassVar[str] = "gradwire.compressors.truncate:TruncateCompressor"

    ratio: float
    """Bytes of the gradient over bytes of the payload: 1 or more."""
    unsafe: bool = False

    def __post_init__(self) -> None:
        number("ratio", self.ratio, "how many times smaller the payload is", positive=True, error=SpecError)
        if self.ratio < 1:
            raise SpecError(f"ratio is {self.ratio}: it must be at least 1, 4 for a quarter of the bytes.")
        if not isinstance(self.unsafe, bool):
            raise SpecError(f"unsafe is {show(self.unsafe)}: it must be True or False. True says that no model is to learn.")

    def kept(self, numel: int) -> int:
        """Number of elements sent of a run of `numel` elements."""
        return int(-(-numel // self.ratio))

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return self.kept(sum(run.numel for run in runs)) * itemsize
