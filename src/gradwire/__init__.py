"""gradwire: data-parallel PyTorch training that stays fast when the network is not.

The names resolve when they are first used, so `import gradwire` loads no torch.
"""

import gc
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire._version import __version__
    from gradwire.api import Handle, parallelize
    from gradwire.compressors import roundtrip
    from gradwire.core import (
        DGC,
        FP8,
        QSGD,
        Backward,
        BlockTopK,
        Bucket,
        Cast,
        Cluster,
        Costs,
        Delayed,
        EFSignSGD,
        ErrorFeedback,
        Identity,
        Int8,
        LocalSteps,
        Natural,
        Nesterov,
        OneBit,
        Pipelined,
        Plan,
        PowerSGD,
        Prediction,
        Profile,
        RandomK,
        SignSGD,
        Signum,
        Spec,
        TensorInfo,
        TernGrad,
        Threshold,
        TopK,
        Truncate,
        TwoBit,
    )
    from gradwire.errors import (
        CommunicationError,
        DisagreementError,
        FormatError,
        GradwireError,
        PayloadError,
        PlanError,
        SpecError,
        StepStateError,
        TestbedError,
        WriteError,
    )
    from gradwire.exchange import Exchange, ExchangeStats, Stats, TensorMeta
    from gradwire.integrations.ddp import DDPState, bucket_sizes, ddp_hook
    from gradwire.integrations.islands import islands
    from gradwire.integrations.torchft import elastic
    from gradwire.plan import AdaptiveBits, Policy, Tuned, Uniform, Where

_HOMES = (
    *("_version", "errors", "core", "plan", "compressors", "exchange", "api"),
    *("integrations.ddp", "integrations.torchft", "integrations.islands"),
)
"""The parts of gradwire that have the names. The last six load torch."""

__all__ = [
    "DGC", "FP8", "QSGD", "AdaptiveBits", "Backward", "BlockTopK", "Bucket", "Cast", "Cluster", "CommunicationError",
    "Costs", "DDPState", "Delayed", "DisagreementError", "EFSignSGD", "ErrorFeedback", "Exchange", "ExchangeStats",
    "FormatError", "GradwireError", "Handle", "Identity", "Int8", "LocalSteps", "Natural", "Nesterov", "OneBit",
    "PayloadError", "Pipelined", "Plan", "PlanError", "Policy", "PowerSGD", "Prediction", "Profile", "RandomK",
    "SignSGD", "Signum", "Spec", "SpecError", "Stats", "StepStateError", "TensorInfo", "TensorMeta", "TernGrad",
    "TestbedError", "Threshold", "TopK", "Truncate", "Tuned", "TwoBit", "Uniform", "Where", "WriteError", "__version__",
    "bucket_sizes", "ddp_hook", "elastic", "islands", "parallelize", "roundtrip",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # what modules define stays, and the collector would look at it, and at all of torch, again and again
    try:
        homes = (importlib.import_module(f"gradwire.{home}") for home in _HOMES)
        value: object = next(getattr(home, name) for home in homes if hasattr(home, name))
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
