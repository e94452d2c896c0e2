"""gradwire: data-parallel PyTorch training that stays fast when the network is not.

The names resolve when they are first used, so `import gradwire` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire._version import __version__
    from gradwire.core import (
        QSGD,
        Backward,
        Bucket,
        Cast,
        Cluster,
        Costs,
        Delayed,
        ErrorFeedback,
        Identity,
        Pipelined,
        Plan,
        Prediction,
        Profile,
        Spec,
        TensorInfo,
    )
    from gradwire.engine import Handle, Stats, parallelize
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
    from gradwire.planner import Policy, Uniform

_HOMES = {
    "gradwire._version": ("__version__",),
    "gradwire.core": (
        "QSGD", "Backward", "Bucket", "Cast", "Cluster", "Costs", "Delayed", "ErrorFeedback", "Identity", "Pipelined",
        "Plan", "Prediction", "Profile", "Spec", "TensorInfo",
    ),
    "gradwire.engine": ("Handle", "Stats", "parallelize"),
    "gradwire.errors": (
        "CommunicationError", "DisagreementError", "FormatError", "GradwireError", "PayloadError", "PlanError",
        "SpecError", "StepStateError", "TestbedError", "WriteError",
    ),
    "gradwire.planner": ("Policy", "Uniform"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "QSGD",
    "Backward",
    "Bucket",
    "Cast",
    "Cluster",
    "CommunicationError",
    "Costs",
    "Delayed",
    "DisagreementError",
    "ErrorFeedback",
    "FormatError",
    "GradwireError",
    "Handle",
    "Identity",
    "PayloadError",
    "Pipelined",
    "Plan",
    "PlanError",
    "Policy",
    "Prediction",
    "Profile",
    "Spec",
    "SpecError",
    "Stats",
    "StepStateError",
    "TensorInfo",
    "TestbedError",
    "Uniform",
    "WriteError",
    "__version__",
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
