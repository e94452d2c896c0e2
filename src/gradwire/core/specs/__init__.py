"""Specs: frozen data that names a compressor.

A spec is configuration, registry key, repr, equality and JSON at once. This package holds the data, and what the data alone
declares. `gradwire.compressors` has the compressor of each spec, by the spec's class.

>>> spec = ErrorFeedback(QSGD(bits=4))
>>> spec
ErrorFeedback(QSGD(bits=4, block=128, rounding='nearest'))
>>> spec.to_dict()
{'id': 'error_feedback', 'inner': {'id': 'qsgd', 'bits': 4, 'block': 128, 'rounding': 'nearest'}}
>>> spec_from_dict(spec.to_dict()) == spec
True
"""

from gradwire.core.specs.base import (
    BlockSpec,
    ElementRun,
    ElementWeights,
    Kernels,
    Law,
    Spec,
    as_spec,
    example_specs,
    installed_specs,
    register_spec,
    registered_specs,
    spec_from_dict,
    spec_from_text,
)
from gradwire.core.specs.dense import FP8, Cast, Identity, Natural, Truncate
from gradwire.core.specs.feedback import ErrorFeedback, innermost
from gradwire.core.specs.low_rank import PowerSGD
from gradwire.core.specs.quantisers import QSGD, Int8, TernGrad, TwoBit
from gradwire.core.specs.signs import EFSignSGD, OneBit, SignSGD, Signum
from gradwire.core.specs.sparse import DGC, BlockTopK, RandomK, Threshold, TopK

__all__ = [
    "DGC", "FP8", "QSGD", "BlockSpec", "BlockTopK", "Cast", "EFSignSGD", "ElementRun", "ElementWeights", "ErrorFeedback",
    "Identity", "Int8", "Kernels", "Law", "Natural", "OneBit", "PowerSGD", "RandomK", "SignSGD", "Signum", "Spec", "TernGrad",
    "Threshold", "TopK", "Truncate", "TwoBit", "as_spec", "example_specs", "innermost", "installed_specs",
    "register_spec", "registered_specs", "spec_from_dict", "spec_from_text",
]  # fmt: skip
