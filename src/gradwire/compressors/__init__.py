"""Compressors: one method a file, found by the class of its spec."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gradwire.compressors.base import Compressor, Context
from gradwire.compressors.block_topk import BlockTopKCompressor
from gradwire.compressors.cast import CastCompressor
from gradwire.compressors.dgc import DGCCompressor
from gradwire.compressors.error_feedback import ErrorFeedbackCompressor
from gradwire.compressors.fp8 import FP8Compressor
from gradwire.compressors.identity import IdentityCompressor
from gradwire.compressors.mean_signs import MeanSignCompressor
from gradwire.compressors.mixed_precision import BesideCompressor
from gradwire.compressors.natural import NaturalCompressor
from gradwire.compressors.powersgd import PowerSGDCompressor
from gradwire.compressors.qsgd import Int8Compressor, QSGDCompressor
from gradwire.compressors.randomk import CommonRandomKCompressor, OwnRandomKCompressor
from gradwire.compressors.signs import SignSGDCompressor, SignumCompressor
from gradwire.compressors.stores import store_for
from gradwire.compressors.terngrad import TernGradCompressor
from gradwire.compressors.threshold import ThresholdCompressor
from gradwire.compressors.topk import CodedTopKCompressor, TopKCompressor
from gradwire.compressors.truncate import TruncateCompressor
from gradwire.compressors.twobit import TwoBitCompressor
from gradwire.core import entry_points, specs
from gradwire.errors import SpecError

__all__ = ["BesideCompressor", "Compressor", "Context", "compressor_for", "register_compressor", "store_for"]

_BY_SPEC: dict[type[specs.Spec], Callable[[Any], Compressor]] = {
    specs.Identity: IdentityCompressor,
    specs.Cast: CastCompressor,
    specs.QSGD: QSGDCompressor,
    specs.PowerSGD: PowerSGDCompressor,
    specs.SignSGD: SignSGDCompressor,
    specs.Signum: SignumCompressor,
    specs.EFSignSGD: MeanSignCompressor,
    specs.OneBit: MeanSignCompressor,
    specs.TwoBit: TwoBitCompressor,
    specs.TernGrad: TernGradCompressor,
    specs.Int8: Int8Compressor,
    specs.FP8: FP8Compressor,
    specs.Natural: NaturalCompressor,
    specs.ErrorFeedback: lambda spec: ErrorFeedbackCompressor(spec, compressor_for(spec.inner)),
    specs.TopK: lambda spec: (
        CodedTopKCompressor(spec, compressor_for(spec.values)) if spec.values.encodes else TopKCompressor(spec)
    ),
    specs.Threshold: ThresholdCompressor,
    specs.BlockTopK: BlockTopKCompressor,
    specs.RandomK: lambda spec: (
        CommonRandomKCompressor(spec) if spec.indices == "common" else OwnRandomKCompressor(spec)
    ),
    specs.DGC: lambda spec: DGCCompressor(
        spec, compressor_for(specs.ErrorFeedback(specs.TopK(spec.ratio, spec.selection)))
    ),
    specs.Truncate: TruncateCompressor,
}


def register_compressor(spec_class: type[specs.Spec], make: Callable[[Any], Compressor]) -> None:
    """Register the compressor of a spec class. `make` takes the spec and returns the compressor."""
    _BY_SPEC[spec_class] = make


def compressor_for(spec: specs.Spec) -> Compressor:
    """The compressor that runs a spec. Raises SpecError if none is registered for its class.

    >>> from gradwire.core.specs import QSGD
    >>> compressor_for(QSGD(bits=4)).spec
    QSGD(bits=4, block=128)
    """
    if type(spec) not in _BY_SPEC and spec.id in entry_points.names(entry_points.COMPRESSORS):
        entry_points.load(entry_points.COMPRESSORS, spec.id, partial(register_compressor, type(spec)), SpecError)
    make = _BY_SPEC.get(type(spec))
    if make is None:
        raise SpecError(
            f"{spec!r} has no compressor: its class {type(spec).__name__} is registered as a spec only. "
            "Register a compressor with gradwire.compressors.register_compressor, or in the entry points of "
            f"{entry_points.COMPRESSORS}."
        )
    return make(spec)
