"""The pure formats: specs, profile, cluster, costs and plan. Strict, frozen, JSON in and out; no torch."""

from gradwire.core.cluster import Cluster, Link
from gradwire.core.costs import CodecCosts, Costs
from gradwire.core.plan import Bucket, Plan, Prediction
from gradwire.core.profile import Made, Profile, TensorProfile
from gradwire.core.schedules import Backward, Delayed, Pipelined, Schedule
from gradwire.core.specs import QSGD, Cast, ErrorFeedback, Identity, Spec, register_spec, spec_from_dict
from gradwire.core.tensors import TensorInfo, fingerprint

__all__ = [
    "QSGD",
    "Backward",
    "Bucket",
    "Cast",
    "Cluster",
    "CodecCosts",
    "Costs",
    "Delayed",
    "ErrorFeedback",
    "Identity",
    "Link",
    "Made",
    "Pipelined",
    "Plan",
    "Prediction",
    "Profile",
    "Schedule",
    "Spec",
    "TensorInfo",
    "TensorProfile",
    "fingerprint",
    "register_spec",
    "spec_from_dict",
]
