"""gradwire: data-parallel PyTorch training that stays fast when the network is not.

The names resolve when they are first used, so `import gradwire` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire._version import __version__
    from gradwire.api import Handle, parallelize
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
        Natural,
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
    from gradwire.planner import AdaptiveBits, Policy, Tuned, Uniform, Where

_HOMES = {
    "gradwire._version": ("__version__",),
    "gradwire.core": (
        "DGC", "FP8", "QSGD", "Backward", "BlockTopK", "Bucket", "Cast", "Cluster", "Costs", "Delayed", "EFSignSGD",
        "ErrorFeedback", "Identity", "Int8", "Natural", "OneBit", "Pipelined", "Plan", "PowerSGD", "Prediction",
        "Profile", "RandomK", "SignSGD", "Signum", "Spec", "TensorInfo", "TernGrad", "Threshold", "TopK", "Truncate",
        "TwoBit",
    ),
    "gradwire.api": ("Handle", "parallelize"),
    "gradwire.exchange": ("Exchange", "ExchangeStats", "Stats", "TensorMeta"),
    "gradwire.errors": (
        "CommunicationError", "DisagreementError", "FormatError", "GradwireError", "PayloadError", "PlanError",
        "SpecError", "StepStateError", "TestbedError", "WriteError",
    ),
    "gradwire.integrations.ddp": ("DDPState", "bucket_sizes", "ddp_hook"),
    "gradwire.planner": ("AdaptiveBits", "Policy", "Tuned", "Uniform", "Where"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DGC",
    "FP8",
    "QSGD",
    "AdaptiveBits",
    "Backward",
    "BlockTopK",
    "Bucket",
    "Cast",
    "Cluster",
    "CommunicationError",
    "Costs",
    "DDPState",
    "Delayed",
    "DisagreementError",
    "EFSignSGD",
    "ErrorFeedback",
    "Exchange",
    "ExchangeStats",
    "FormatError",
    "GradwireError",
    "Handle",
    "Identity",
    "Int8",
    "Natural",
    "OneBit",
    "PayloadError",
    "Pipelined",
    "Plan",
    "PlanError",
    "Policy",
    "PowerSGD",
    "Prediction",
    "Profile",
    "RandomK",
    "SignSGD",
    "Signum",
    "Spec",
    "SpecError",
    "Stats",
    "StepStateError",
    "TensorInfo",
    "TensorMeta",
    "TernGrad",
    "TestbedError",
    "Threshold",
    "TopK",
    "Truncate",
    "Tuned",
    "TwoBit",
    "Uniform",
    "Where",
    "WriteError",
    "__version__",
    "bucket_sizes",
    "ddp_hook",
    "parallelize",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
