"""Compressors: one method a file, found by the class of its spec."""

from collections.abc import Callable
from typing import Any

from gradwire.compressors.base import Compressor, Context
from gradwire.compressors.cast import CastCompressor
from gradwire.compressors.error_feedback import ErrorFeedbackCompressor
from gradwire.compressors.fp8 import FP8Compressor
from gradwire.compressors.identity import IdentityCompressor
from gradwire.compressors.int8 import Int8Compressor
from gradwire.compressors.natural import NaturalCompressor
from gradwire.compressors.qsgd import QSGDCompressor
from gradwire.core.specs import FP8, QSGD, Cast, ErrorFeedback, Identity, Int8, Natural, Spec
from gradwire.errors import SpecError

__all__ = ["Compressor", "Context", "compressor_for", "register_compressor"]

_BY_SPEC: dict[type[Spec], Callable[[Any], Compressor]] = {
    Identity: IdentityCompressor,
    Cast: CastCompressor,
    QSGD: QSGDCompressor,
    Int8: Int8Compressor,
    FP8: FP8Compressor,
    Natural: NaturalCompressor,
    ErrorFeedback: lambda spec: ErrorFeedbackCompressor(spec, compressor_for(spec.inner)),
}


def register_compressor(spec_class: type[Spec], make: Callable[[Any], Compressor]) -> None:
    """Say what runs a spec of your own. `make` takes the spec and returns its compressor."""
    _BY_SPEC[spec_class] = make


def compressor_for(spec: Spec) -> Compressor:
    """The compressor that runs a spec. Raises SpecError if none is registered for its class.

    >>> from gradwire.core.specs import QSGD
    >>> compressor_for(QSGD(bits=4)).granularity
    128
    """
    make = _BY_SPEC.get(type(spec))
    if make is None:
        raise SpecError(
            f"{spec!r} has no compressor: its class {type(spec).__name__} is registered as a spec only. Call "
            "gradwire.compressors.register_compressor with what runs it."
        )
    return make(spec)
