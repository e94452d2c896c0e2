"""Plans as users write them: policies, options and schemes, which become a `Plan` for given tensors. Pure: no torch."""

from gradwire.plan.adaptive import AdaptiveBits, Tuned
from gradwire.plan.grammar import DEVICES
from gradwire.plan.options import Option, option_of, select, tree
from gradwire.plan.policy import EMBEDDINGS, Policy, Uniform, Where, launch_of
from gradwire.plan.schemes import (
    FLAT,
    RESTRICTED,
    between_nodes,
    carries,
    check_known,
    codes_own_gradient,
    correction_plan,
    encodes_again,
    names_of,
    tasks_of,
    with_buckets,
)

__all__ = [
    "DEVICES", "EMBEDDINGS", "FLAT", "RESTRICTED", "AdaptiveBits", "Option", "Policy", "Tuned", "Uniform", "Where",
    "between_nodes", "carries", "check_known", "codes_own_gradient", "correction_plan", "encodes_again", "launch_of", "names_of",
    "option_of", "select", "tasks_of", "tree", "with_buckets",
]  # fmt: skip
