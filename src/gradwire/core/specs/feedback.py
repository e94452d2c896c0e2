"""Error feedback around a spec."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gradwire.core.checks import number, show
from gradwire.core.specs.base import ElementRun, Law, Spec, SpecField, as_spec, register_spec
from gradwire.core.specs.quantisers import QSGD
from gradwire.core.specs.signs import SignSGD
from gradwire.errors import SpecError


@register_spec
class ErrorFeedback(Spec, frozen=True):
    """Adds the error of `inner` to the next step's gradient, with one residual per encode.

    Over many steps nothing is lost. The price: memory for the residual, and delayed updates. `inner` gets its best settings for
    feedback (`under_feedback`): QSGD rounds to nearest unless its `rounding` says otherwise.
    Raises SpecError if `inner` is lossless, has state of its own, or sends no magnitudes.
    """

    id: ClassVar[str] = "error_feedback"
    example: ClassVar[tuple[Spec]] = (QSGD(bits=2),)
    state: ClassVar[tuple[str, ...]] = ("residual",)
    compressor: ClassVar[str] = "gradwire.compressors.error_feedback:ErrorFeedbackCompressor"

    inner: SpecField
    decay: float = 1.0
    """The part of a residual that is added to the next gradient. 1: nothing is lost. Less: old ones fade; 0.95 in SparseLoCo."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "inner", as_spec("inner", self.inner).under_feedback())
        inner = self.inner
        if not inner.encodes:
            raise SpecError(f"inner is {inner!r}, which is lossless: there is no error to feed back. Use it alone.")
        if inner.feedback:
            raise SpecError(f"inner is {inner!r}: it has a residual of its own, which keeps all of the error. Use it alone.")
        if inner.state or isinstance(inner, SignSGD):
            raise SpecError(f"inner is {inner!r}: its signs have no magnitude, so their error is unknown. Use EFSignSGD().")
        number("decay", self.decay, "the part of a residual that is kept", positive=True, error=SpecError)
        if self.decay > 1:
            raise SpecError(f"decay is {show(self.decay)}: it must be a part, above 0 and at most 1.")
        if self.decay < 1 and inner.rounds:
            raise SpecError(
                f"decay is {show(self.decay)} and inner is {inner!r}, whose payloads are summed on the wire: only residuals of "
                "payloads that are gathered decay. Leave decay out, or use another spec."
            )

    @property
    def schemes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.schemes

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_zeros

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.inner.rounds

    @property
    def law(self) -> Law:
        return self.inner.law

    @property
    def touches_segments_only(self) -> bool:  # type: ignore[override]
        return self.inner.touches_segments_only

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    @property
    def element_bits(self) -> int:
        return self.inner.element_bits

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return self.inner.payload_bytes(runs, itemsize)

    def at_step(self, step: int) -> "ErrorFeedback":
        return ErrorFeedback(self.inner.at_step(step), self.decay)


def innermost(spec: Spec) -> Spec:
    """The inner spec of ErrorFeedback; any other spec itself.

    >>> innermost(ErrorFeedback(QSGD()))
    QSGD(bits=4, block=128, rounding='nearest')
    """
    return spec.inner if isinstance(spec, ErrorFeedback) else spec
