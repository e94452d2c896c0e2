"""Compressors: one method a file, found by the class of its spec."""

from collections.abc import Callable
from typing import Any

from gradwire.compressors.base import Compressor, Context
from gradwire.compressors.cast import CastCompressor
from gradwire.compressors.error_feedback import ErrorFeedbackCompressor
from gradwire.compressors.identity import IdentityCompressor
from gradwire.compressors.mean_signs import MeanSignCompressor
from gradwire.compressors.qsgd import QSGDCompressor
from gradwire.compressors.signs import SignSGDCompressor, SignumCompressor
from gradwire.compressors.terngrad import TernGradCompressor
from gradwire.compressors.twobit import TwoBitCompressor
from gradwire.core.specs import (
    QSGD,
    Cast,
    EFSignSGD,
    ErrorFeedback,
    Identity,
    OneBit,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    TwoBit,
)
from gradwire.errors import SpecError

__all__ = ["Compressor", "Context", "compressor_for", "register_compressor"]

_BY_SPEC: dict[type[Spec], Callable[[Any], Compressor]] = {
    Identity: IdentityCompressor,
    Cast: CastCompressor,
    QSGD: QSGDCompressor,
    ErrorFeedback: lambda spec: ErrorFeedbackCompressor(spec, compressor_for(spec.inner)),
    SignSGD: SignSGDCompressor,
    Signum: SignumCompressor,
    EFSignSGD: MeanSignCompressor,
    OneBit: MeanSignCompressor,
    TwoBit: TwoBitCompressor,
    TernGrad: TernGradCompressor,
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
