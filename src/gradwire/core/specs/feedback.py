"""Error feedback around a spec."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gradwire.core.checks import number, show, whole
from gradwire.core.specs.base import ElementRun, ElementWeights, Spec, SpecField, as_spec, of_part, register_spec
from gradwire.core.specs.quantisers import QSGD
from gradwire.core.specs.signs import SignSGD
from gradwire.errors import SpecError

WARM_UP_BITS = 4
"""Bits of QSGD in the steps of a warm-up."""


@register_spec
class ErrorFeedback(Spec, frozen=True):
    """Adds the error of `inner` to the next step's gradient, with one residual per encode.

    Over many steps nothing is lost. The price: memory for the residual, and delayed updates. `inner` gets its best settings for
    feedback (`under_feedback`): QSGD rounds to nearest unless its `rounding` says otherwise.
    Raises SpecError if `inner` is lossless, has state of its own, sends no magnitudes, or has too few bits for its scale 'l2'.
    """

    id: ClassVar[str] = "error_feedback"
    example: ClassVar[tuple[Spec]] = (QSGD(bits=2),)
    state: ClassVar[tuple[str, ...]] = ("residual",)
    compressor: ClassVar[str] = "gradwire.compressors.error_feedback:ErrorFeedbackCompressor"

    inner: SpecField
    decay: float = 1.0
    """The part of a residual that is added to the next gradient. 1: nothing is lost. Less: old ones fade; 0.95 in SparseLoCo."""
    weights: float = 0.0
    """Encode each element over its usual size, so that small elements do not wait for the large ones of their block. The usual
    size is the root of a mean of squares, of which each step keeps this part; 0.98 is usual. 0: no weights. Costs no bytes on the
    wire and 5 bytes of memory an element. inner must be QSGD with scale 'ls'."""
    floor: float = 0.01
    """The part of a block's mean square that every weight has at least. Larger: weights that differ less."""
    warm_up_steps: int = 0
    """First steps in which QSGD sends 4 bits instead of fewer. Adam keeps the error of its first steps for long; 20 are usual."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "inner", as_spec("inner", self.inner).under_feedback())
        inner = self.inner
        if not inner.encodes:
            raise SpecError(f"inner is {inner!r}, which is lossless: there is no error to feed back. Use it alone.")
        if inner.feedback:
            raise SpecError(f"inner is {inner!r}: it has a residual of its own, which keeps all of the error. Use it alone.")
        if inner.state or isinstance(inner, SignSGD):
            raise SpecError(f"inner is {inner!r}: its signs have no magnitude, so their error is unknown. Use EFSignSGD().")
        inner.check_fed_back("inner")
        number("decay", self.decay, "the part of a residual that is kept", positive=True, error=SpecError)
        if self.decay > 1:
            raise SpecError(f"decay is {show(self.decay)}: it must be a part, above 0 and at most 1.")
        if self.decay < 1 and inner.rounds:
            raise SpecError(
                f"decay is {show(self.decay)} and inner is {inner!r}, whose payloads are summed on the wire: only residuals of "
                "payloads that are gathered decay. Leave decay out, or use another spec."
            )

        self._check_weights()
        whole("warm_up_steps", self.warm_up_steps, "steps of warm-up", error=SpecError)
        if self.warm_up_steps and not (isinstance(inner, QSGD) and inner.bits < WARM_UP_BITS):
            raise SpecError(
                f"warm_up_steps is {self.warm_up_steps} and inner is {inner!r}: a warm-up sends {WARM_UP_BITS} bits in place of "
                "fewer. Use QSGD with 2 or 3 bits, or leave warm_up_steps out."
            )

    def _check_weights(self) -> None:
        number("weights", self.weights, "the part of old squares that is kept, 0 for no weights", error=SpecError)
        number("floor", self.floor, "a part of a block's mean square", error=SpecError)
        if not 1e-6 <= self.floor <= 1:
            raise SpecError(f"floor is {show(self.floor)}: it must be from 1e-6 to 1. Leave it out: 0.01 is usual.")
        if not self.weights:
            return
        if not 0.5 <= self.weights < 1:
            raise SpecError(f"weights is {show(self.weights)}: it must be 0, or at least 0.5 and below 1. Use 0.98.")
        inner = self.inner
        if not (isinstance(inner, QSGD) and inner.scale == "ls" and inner.blocks == "tensor"):
            raise SpecError(
                f"weights is {show(self.weights)} and inner is {inner!r}: elements have weights in blocks of one tensor, with a "
                "scale by least squares. Use QSGD(scale='ls'), or leave weights out."
            )

    @property
    def element_weights(self) -> ElementWeights | None:
        inner = self.inner
        return ElementWeights(self.weights, self.floor, inner.block) if self.weights and isinstance(inner, QSGD) else None

    @property
    def batches(self) -> bool:
        return self.inner.batches and self.decay == 1 and not self.weights

    schemes = of_part("inner", "schemes")
    keeps_zeros = of_part("inner", "keeps_zeros")
    random_seed = of_part("inner", "random_seed")
    follows_scale = of_part("inner", "follows_scale")
    rounds = of_part("inner", "rounds")
    law = of_part("inner", "law")
    touches_segments_only = of_part("inner", "touches_segments_only")
    granularity = of_part("inner", "granularity")
    element_bits = of_part("inner", "element_bits")

    def indexed(self, runs: Sequence[ElementRun]) -> int:
        return self.inner.indexed(runs)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return self.inner.payload_bytes(runs, itemsize)

    def at_step(self, step: int) -> "ErrorFeedback":
        """
        >>> spec = ErrorFeedback(QSGD(bits=2, scale="ls"), warm_up_steps=20)
        >>> spec.at_step(19), spec.at_step(20)
        (ErrorFeedback(QSGD(bits=4, block=128, scale='ls')), ErrorFeedback(QSGD(bits=2, block=128, scale='ls')))
        """
        inner = self.inner.at_step(step)
        if step < self.warm_up_steps:
            inner = msgspec.structs.replace(inner, bits=WARM_UP_BITS)
        return msgspec.structs.replace(self, inner=inner, warm_up_steps=0)


def innermost(spec: Spec) -> Spec:
    """The inner spec of ErrorFeedback; any other spec itself.

    >>> innermost(ErrorFeedback(QSGD()))
    QSGD(bits=4, block=128, rounding='nearest')
    """
    return spec.inner if isinstance(spec, ErrorFeedback) else spec
